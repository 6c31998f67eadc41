-- Give entries back to the queue; they keep their ids, and so their places.
--
-- KEYS[1]   a stream
-- ARGV[1]   group
-- ARGV[2]   consumer that has them; entries that another consumer took over stay there
-- ARGV[3]   consumer that holds entries which were given back
-- ARGV[4..] ids
--
-- Returns how many. The delivery is not counted, since the message is not to blame.

local key, group, me, back = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local given = 0
for i = 4, #ARGV do
    local row = redis.pcall("XPENDING", key, group, ARGV[i], ARGV[i], 1, me)
    if not row.err and row[1] then
        local count = math.max(tonumber(row[1][4]) - 1, 0)
        redis.call("XCLAIM", key, group, back, 0, ARGV[i], "RETRYCOUNT", count, "JUSTID")
        given = given + 1
    end
end
return given
