-- Turn a message that cannot be decoded into a dead letter.
--
-- KEYS[1]  a stream
-- KEYS[2]  <ns>dead:<queue>
-- ARGV[1]  group
-- ARGV[2]  id
-- ARGV[3]  queue
-- ARGV[4]  reason

local ns = string.sub(KEYS[2], 1, #KEYS[2] - #("dead:" .. ARGV[3]))
local priority = string.match(string.sub(KEYS[1], #ns + 1), "^q:(%d+):")
local entry = redis.call("XRANGE", KEYS[1], ARGV[2], ARGV[2])[1]
if entry then
    redis.call("XADD", KEYS[2], "*", "queue", ARGV[3], "id", ARGV[2], "reason", ARGV[4],
        "deliveries", 1, "priority", priority, unpack(entry[2]))
end
redis.call("XACK", KEYS[1], ARGV[1], ARGV[2])
redis.call("XDEL", KEYS[1], ARGV[2])
