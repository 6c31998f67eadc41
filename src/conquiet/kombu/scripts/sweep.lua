-- Look through some of the names for queues whose x-expires has passed, and forget those that were
-- found so long ago. Until then a late message to such a name is dropped; afterwards it would create
-- a queue that stays.
--
-- KEYS[1]  <ns>queues
-- KEYS[2]  <ns>gone      sorted set: queue -> the millisecond at which it was found to have expired
-- ARGV[1]  <ns>
-- ARGV[2]  milliseconds that a name is kept
-- ARGV[3]  milliseconds in which one sweep by any consumer is enough
-- ARGV[4]  cursor: 0, then what the last call returned
-- ARGV[5]  about how many names
--
-- Returns {the next cursor or 0, how many have expired, forgotten name, ...}.

local ns, keep, enough = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

if ARGV[4] == "0" then
    local SWEPT = "" -- no queue has this name
    local last = tonumber(redis.call("ZSCORE", KEYS[2], SWEPT) or 0)
    if now - last < enough then
        return { "0", 0 }
    end
    redis.call("ZADD", KEYS[2], string.format("%.0f", now), SWEPT)
    -- Names of that age which are left belong to queues that were deleted since.
    redis.call("ZREMRANGEBYSCORE", KEYS[2], "-inf", "(" .. string.format("%.0f", now - 2 * keep))
end

local function is_there(queue)
    local streams = {}
    for priority = 0, 9 do
        streams[priority + 1] = ns .. "q:" .. priority .. ":" .. queue
    end
    return redis.call("EXISTS", unpack(streams)) > 0
end

local found = redis.call("HSCAN", KEYS[1], ARGV[4], "COUNT", ARGV[5])
local answer = { found[1], 0 }
local queues = found[2]
for i = 1, #queues, 2 do
    local queue, expires = queues[i], string.match(queues[i + 1], "^%d+|")
    if expires and is_there(queue) then
        redis.call("ZREM", KEYS[2], queue)
    elseif expires then
        answer[2] = answer[2] + 1
        local since = tonumber(redis.call("ZSCORE", KEYS[2], queue) or now)
        if now - since >= keep then
            redis.call("HDEL", KEYS[1], queue)
            redis.call("ZREM", KEYS[2], queue)
            answer[#answer + 1] = queue
        else
            redis.call("ZADD", KEYS[2], string.format("%.0f", since), queue)
        end
    end
end
return answer
