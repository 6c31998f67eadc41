-- Renew the leases of consumers.
--
-- KEYS[1]   <ns>leases
-- ARGV[1]   milliseconds that a lease lasts
-- ARGV[2..] consumers

local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ends = string.format("%.0f", now + tonumber(ARGV[1]))
for i = 2, #ARGV do
    redis.call("ZADD", KEYS[1], "GT", ends, ARGV[i])
end
-- A consumer without a lease is dead, so ended leases need not be kept; a day is for inspection.
redis.call("ZREMRANGEBYSCORE", KEYS[1], "-inf", string.format("%.0f", now - 86400000))
