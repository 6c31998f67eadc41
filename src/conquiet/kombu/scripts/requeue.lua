-- Move a message to the end of its queue, as the list transport does.
--
-- KEYS[1]  a stream
-- ARGV[1]  group
-- ARGV[2]  consumer that has it; if another consumer took it over, nothing happens
-- ARGV[3]  id
-- ARGV[4]  deliveries after which a message is a dead letter; 0 for no limit
-- ARGV[5]  <ns>
--
-- Returns 1 if it was moved, 2 if it became a dead letter, 0 if another consumer has it.

local key, group, id, limit, ns = KEYS[1], ARGV[1], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local row = redis.pcall("XPENDING", key, group, id, id, 1, ARGV[2])
if row.err or not row[1] then
    return 0
end
local entry = redis.call("XRANGE", key, id, id)[1]
local answer = 0
if entry then
    local fields, deliveries = {}, tonumber(row[1][4])
    for i = 1, #entry[2], 2 do
        if entry[2][i] == "n" then
            deliveries = deliveries + (tonumber(entry[2][i + 1]) or 0)
        else
            fields[#fields + 1] = entry[2][i]
            fields[#fields + 1] = entry[2][i + 1]
        end
    end
    if limit > 0 and deliveries >= limit then
        local priority, queue = string.match(string.sub(key, #ns + 1), "^q:(%d+):(.*)$")
        local reason = "it was rejected in its delivery " .. deliveries .. ", the last one allowed"
        redis.call("XADD", ns .. "dead:" .. queue, "*", "queue", queue, "id", id, "reason", reason,
            "deliveries", deliveries, "priority", priority, unpack(fields))
        answer = 2
    else
        redis.call("XADD", key, "*", "n", deliveries, unpack(fields))
        answer = 1
    end
end
redis.call("XACK", key, group, id)
redis.call("XDEL", key, id)
return answer
