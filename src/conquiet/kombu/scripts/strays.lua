-- Give back entries that are pending with a consumer which never got them: the reply was lost.
--
-- KEYS[1]   a stream
-- ARGV[1]   group
-- ARGV[2]   consumer
-- ARGV[3]   consumer that holds entries which were given back
-- ARGV[4..] ids that the consumer does have
--
-- Returns how many. The deliveries are not counted.

local key, group, me, back = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local has = {}
for i = 4, #ARGV do
    has[ARGV[i]] = true
end
local given, from = 0, "-"
while true do
    local rows = redis.pcall("XPENDING", key, group, from, "+", 100, me)
    if rows.err or #rows == 0 then
        return given
    end
    for _, row in ipairs(rows) do
        from = "(" .. row[1]
        if not has[row[1]] then
            local count = math.max(tonumber(row[4]) - 1, 0)
            redis.call("XCLAIM", key, group, back, 0, row[1], "RETRYCOUNT", count, "JUSTID")
            given = given + 1
        end
    end
end
