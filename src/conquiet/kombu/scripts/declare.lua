-- Declare a queue: store its settings, and restart its x-expires.
--
-- KEYS[1]   <ns>queues
-- KEYS[2..] the streams of the queue, that of priority 0 first
-- ARGV[1]   group
-- ARGV[2]   queue
-- ARGV[3]   "<x-expires>|<x-message-ttl>|<x-max-length>", or empty if it was never declared
-- ARGV[4]   milliseconds of x-expires, or empty
--
-- Returns the settings of the queue if it was declared with others, which stay.
--
-- A queue exists while its stream of priority 0 does, even if the queue is empty.

local current = redis.call("HGET", KEYS[1], ARGV[2])
if current and current ~= "" and current ~= ARGV[3] and redis.call("EXISTS", KEYS[2]) == 1 then
    return current
end
redis.call("HSET", KEYS[1], ARGV[2], ARGV[3])
redis.pcall("XGROUP", "CREATE", KEYS[2], ARGV[1], "0", "MKSTREAM")
for i = 2, #KEYS do
    if ARGV[4] ~= "" then
        redis.call("PEXPIRE", KEYS[i], ARGV[4])
    else
        redis.call("PERSIST", KEYS[i])
    end
end
