-- Ack entries, also those that another consumer took over: the work is done. XACK and XDEL run
-- together, so that no entry stays behind that is neither pending nor ever delivered again.
--
-- KEYS[i]  a stream
-- ARGV[1]  group
-- ARGV[2..] of each stream: how many, and the ids

local at = 2
for _, key in ipairs(KEYS) do
    local ids = {}
    for i = 1, tonumber(ARGV[at]) do
        ids[i] = ARGV[at + i]
    end
    at = at + 1 + #ids
    redis.call("XACK", key, ARGV[1], unpack(ids))
    redis.call("XDEL", key, unpack(ids))
end
