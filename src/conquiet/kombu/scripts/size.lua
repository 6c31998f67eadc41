-- Count the ready messages of streams: the length less the entries pending with a consumer.
--
-- KEYS[i]  a stream
-- ARGV[1]  group
-- ARGV[2]  consumer that holds entries which were given back; they are ready
--
-- Returns {ready, pending}.

local ready, held = 0, 0
for _, key in ipairs(KEYS) do
    local length = redis.call("XLEN", key)
    if length > 0 then
        local pending = redis.pcall("XPENDING", key, ARGV[1])
        local others = pending.err and 0 or pending[1]
        for _, row in ipairs(not pending.err and pending[4] or {}) do
            if row[1] == ARGV[2] then
                others = others - tonumber(row[2])
            end
        end
        ready, held = ready + length - others, held + others
    end
end
return { math.max(ready, 0), held }
