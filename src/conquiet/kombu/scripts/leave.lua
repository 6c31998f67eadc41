-- Remove a consumer: give back its pending entries, delete it from the groups, and end its lease.
--
-- KEYS[1]   <ns>leases
-- KEYS[2..] streams
-- ARGV[1]   group
-- ARGV[2]   consumer
-- ARGV[3]   consumer that holds entries which were given back
-- ARGV[4]   how many entries at most
--
-- Returns 1 if there is more, and it has to be called again. The deliveries are not counted.

local group, me, back, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local given = 0
for i = 2, #KEYS do
    local key = KEYS[i]
    repeat
        if given >= most then
            return 1
        end
        local rows = redis.pcall("XPENDING", key, group, "-", "+", 100, me)
        if rows.err then
            break
        end
        for _, row in ipairs(rows) do
            local count = math.max(tonumber(row[4]) - 1, 0)
            redis.call("XCLAIM", key, group, back, 0, row[1], "RETRYCOUNT", count, "JUSTID")
            -- Redis 6.2 does not claim entries that were deleted meanwhile.
            if redis.call("XPENDING", key, group, row[1], row[1], 1, me)[1] then
                redis.call("XACK", key, group, row[1])
            end
            given = given + 1
        end
    until #rows == 0
    redis.pcall("XGROUP", "DELCONSUMER", key, group, me)
end
redis.call("ZREM", KEYS[1], me)
return 0
