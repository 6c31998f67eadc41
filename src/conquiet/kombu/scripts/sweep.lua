-- Forget the queues whose x-expires has passed: their bindings at once, their names later. Until
-- then a late message to such a name is dropped; afterwards it would create a queue that stays.
--
-- KEYS[1]  <ns>queues
-- KEYS[2]  <ns>exchanges
-- KEYS[3]  <ns>gone      sorted set: queue -> the millisecond at which it was found to have expired
-- ARGV[1]  <ns>
-- ARGV[2]  milliseconds that a name is kept
-- ARGV[3]  milliseconds in which one sweep by any consumer is enough
--
-- Returns the names that were forgotten.

local ns, keep, enough = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local SWEPT = "" -- no queue has this name
local last = tonumber(redis.call("ZSCORE", KEYS[3], SWEPT) or 0)
if now - last < enough then
    return {}
end
redis.call("ZADD", KEYS[3], string.format("%.0f", now), SWEPT)

local function is_there(queue)
    local streams = {}
    for priority = 0, 9 do
        streams[priority + 1] = ns .. "q:" .. priority .. ":" .. queue
    end
    return redis.call("EXISTS", unpack(streams)) > 0
end

local gone, forgotten = {}, {}
local queues = redis.call("HGETALL", KEYS[1])
for i = 1, #queues, 2 do
    local queue, expires = queues[i], string.match(queues[i + 1], "^%d+|")
    if expires and is_there(queue) then
        redis.call("ZREM", KEYS[3], queue)
    elseif expires then
        gone[queue] = true
        local since = tonumber(redis.call("ZSCORE", KEYS[3], queue) or now)
        if now - since >= keep then
            redis.call("HDEL", KEYS[1], queue)
            redis.call("ZREM", KEYS[3], queue)
            forgotten[#forgotten + 1] = queue
        else
            redis.call("ZADD", KEYS[3], string.format("%.0f", since), queue)
        end
    end
end
-- Names of that age which are left belong to queues that were deleted since.
redis.call("ZREMRANGEBYSCORE", KEYS[3], "-inf", "(" .. string.format("%.0f", now - keep))
if not next(gone) then
    return forgotten
end
for _, exchange in ipairs(redis.call("SMEMBERS", KEYS[2])) do
    local table = ns .. "bindings:" .. exchange
    for _, member in ipairs(redis.call("SMEMBERS", table)) do
        if gone[cjson.decode(member)[3]] then
            redis.call("SREM", table, member)
        end
    end
    if redis.call("EXISTS", table) == 0 then
        redis.call("SREM", KEYS[2], exchange)
    end
end
return forgotten
