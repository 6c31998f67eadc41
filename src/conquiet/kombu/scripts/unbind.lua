-- Remove bindings to queues whose x-expires has passed, of some of an exchange's bindings.
--
-- KEYS[1]  <ns>queues
-- KEYS[2]  <ns>exchanges
-- KEYS[3]  <ns>bindings:<exchange>
-- ARGV[1]  <ns>
-- ARGV[2]  exchange
-- ARGV[3]  cursor: 0, then what the last call returned
-- ARGV[4]  about how many bindings
--
-- Returns the next cursor or 0.

local function has_expired(queue)
    local settings = redis.call("HGET", KEYS[1], queue)
    if settings and not string.match(settings, "^%d+|") then
        return false
    end
    local streams = {}
    for priority = 0, 9 do
        streams[priority + 1] = ARGV[1] .. "q:" .. priority .. ":" .. queue
    end
    return redis.call("EXISTS", unpack(streams)) == 0
end

local found = redis.call("SSCAN", KEYS[3], ARGV[3], "COUNT", ARGV[4])
for _, member in ipairs(found[2]) do
    if has_expired(cjson.decode(member)[3]) then
        redis.call("SREM", KEYS[3], member)
    end
end
if redis.call("EXISTS", KEYS[3]) == 0 then
    redis.call("SREM", KEYS[2], ARGV[2])
end
return found[1]
