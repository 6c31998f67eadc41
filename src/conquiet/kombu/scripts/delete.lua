-- Delete a queue, its messages and all bindings to it.
--
-- KEYS[1]   <ns>queues
-- KEYS[2]   <ns>exchanges     set of the exchanges that have bindings
-- KEYS[3]   <ns>leases
-- KEYS[4..] the streams of the queue
-- ARGV[1]   queue
-- ARGV[2]   <ns>
-- ARGV[3]   group
-- ARGV[4]   the consumer that asks; it does not count as a user of the queue
-- ARGV[5]   "1": only if no living consumer uses it
-- ARGV[6]   "1": only if it is empty
-- ARGV[7]   "1": it expired; its settings stay, so that a late message does not create it again
--
-- Returns 1 if it was deleted, 0 if it was kept.

local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function is_used(key)
    local consumers = redis.pcall("XINFO", "CONSUMERS", key, ARGV[3])
    for _, fields in ipairs(consumers.err and {} or consumers) do
        for i = 1, #fields, 2 do
            local name = fields[i] == "name" and fields[i + 1]
            local ends = name and name ~= ARGV[4] and redis.call("ZSCORE", KEYS[3], name)
            if ends and tonumber(ends) > now then
                return true
            end
        end
    end
    return false
end

for i = 4, #KEYS do
    if ARGV[5] == "1" and is_used(KEYS[i]) then
        return 0
    end
    if ARGV[6] == "1" and redis.call("XLEN", KEYS[i]) > 0 then
        return 0
    end
end
for i = 4, #KEYS do
    redis.call("DEL", KEYS[i])
end
if ARGV[7] ~= "1" then
    redis.call("HDEL", KEYS[1], ARGV[1])
end
for _, exchange in ipairs(redis.call("SMEMBERS", KEYS[2])) do
    local table = ARGV[2] .. "bindings:" .. exchange
    for _, member in ipairs(redis.call("SMEMBERS", table)) do
        if cjson.decode(member)[3] == ARGV[1] then
            redis.call("SREM", table, member)
        end
    end
    if redis.call("EXISTS", table) == 0 then
        redis.call("SREM", KEYS[2], exchange)
    end
end
return 1
