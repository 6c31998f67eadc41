-- Give back the entries of consumers whose lease has ended: their process is dead or cut off.
--
-- KEYS[1]   <ns>leases
-- KEYS[2..] streams
-- ARGV[1]   group
-- ARGV[2]   consumer that holds entries which were given back
-- ARGV[3]   how many entries at most
-- ARGV[4]   the consumer that asks, which is alive although a full server did not renew its lease
--
-- Returns {entries given back, consumers removed, 1 if there is more}. The deliveries stay counted,
-- since the message may have killed its consumer.

local group, back, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local moved, removed = 0, 0

local function is_dead(name)
    local ends = redis.call("ZSCORE", KEYS[1], name)
    return name ~= back and name ~= ARGV[4] and (not ends or tonumber(ends) <= now)
end

local function move_all(key, name)
    while moved < most do
        local rows = redis.call("XPENDING", key, group, "-", "+", 100, name)
        if #rows == 0 then
            return true
        end
        local ids = {}
        for i, row in ipairs(rows) do
            ids[i] = row[1]
        end
        local claim = { "XCLAIM", key, group, back, 0, unpack(ids) }
        claim[#claim + 1] = "JUSTID"
        redis.call(unpack(claim))
        moved = moved + #ids
        -- Redis 6.2 does not claim entries that were deleted meanwhile; they are acked instead.
        for _, row in ipairs(redis.call("XPENDING", key, group, ids[1], ids[#ids], #ids, name)) do
            redis.call("XACK", key, group, row[1])
        end
    end
    return false
end

for i = 2, #KEYS do
    local key = KEYS[i]
    local consumers = redis.pcall("XINFO", "CONSUMERS", key, group)
    for _, fields in ipairs(consumers.err and {} or consumers) do
        local name
        for j = 1, #fields, 2 do
            name = fields[j] == "name" and fields[j + 1] or name
        end
        if is_dead(name) then
            if not move_all(key, name) then
                return { moved, removed, 1 }
            end
            redis.call("XGROUP", "DELCONSUMER", key, group, name)
            removed = removed + 1
        end
    end
end
return { moved, removed, 0 }
