-- Renew the lease of a consumer.
--
-- KEYS[1]   <ns>leases
-- ARGV[1]   milliseconds that a lease lasts
-- ARGV[2]   consumer
--
-- Returns 1 if the lease had ended before: other consumers may have taken over its entries.

local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ends = string.format("%.0f", now + tonumber(ARGV[1]))
local before = redis.call("ZSCORE", KEYS[1], ARGV[2])
redis.call("ZADD", KEYS[1], "GT", ends, ARGV[2])
-- A consumer without a lease is dead, so ended leases need not be kept; a day is for inspection.
redis.call("ZREMRANGEBYSCORE", KEYS[1], "-inf", string.format("%.0f", now - 86400000))
return (before and tonumber(before) > now) and 0 or 1
