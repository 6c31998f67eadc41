-- Register a consumer of a queue, so that the queue counts as used even before the first read.
--
-- KEYS[1]  <ns>leases
-- KEYS[2]  <ns>queues
-- KEYS[3]  the queue's stream of priority 0
-- ARGV[1]  group
-- ARGV[2]  consumer
-- ARGV[3]  milliseconds that its lease lasts; one that it has is left to renew.lua
-- ARGV[4]  queue
--
-- Returns the settings of the queue, empty if it has none.

local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call("ZADD", KEYS[1], "NX", string.format("%.0f", now + tonumber(ARGV[3])), ARGV[2])
redis.call("HSETNX", KEYS[2], ARGV[4], "")
redis.pcall("XGROUP", "CREATE", KEYS[3], ARGV[1], "0", "MKSTREAM")
redis.call("XGROUP", "CREATECONSUMER", KEYS[3], ARGV[1], ARGV[2])
return redis.call("HGET", KEYS[2], ARGV[4])
