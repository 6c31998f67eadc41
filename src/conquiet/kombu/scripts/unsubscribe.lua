-- Remove a consumer from the groups of a queue. While it has unacked messages it stays, since
-- DELCONSUMER would drop them.
--
-- KEYS[i]  a stream of the queue
-- ARGV[1]  group
-- ARGV[2]  consumer
--
-- Returns 1 if it stays.

local holds_some = 0
for _, key in ipairs(KEYS) do
    local rows = redis.pcall("XPENDING", key, ARGV[1], "-", "+", 1, ARGV[2])
    if not rows.err and #rows == 0 then
        redis.call("XGROUP", "DELCONSUMER", key, ARGV[1], ARGV[2])
    elseif not rows.err then
        holds_some = 1
    end
end
return holds_some
