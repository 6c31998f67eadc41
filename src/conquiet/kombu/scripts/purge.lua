-- Remove the ready messages; messages that are pending with a consumer stay.
--
-- KEYS[i]  a stream
-- ARGV[1]  group
-- ARGV[2]  consumer that holds entries which were given back
-- ARGV[3]  how many entries at most
--
-- Returns how many; if that is as many as asked for, there may be more. DEL would be shorter, but
-- ends the blocked reads of all consumers with an error, and deletes unacked messages.

local group, back, most = ARGV[1], ARGV[2], tonumber(ARGV[3])

local function last_delivered(key)
    for _, fields in ipairs(redis.call("XINFO", "GROUPS", key)) do
        local found = {}
        for i = 1, #fields, 2 do
            found[fields[i]] = fields[i + 1]
        end
        if found["name"] == group then
            return found["last-delivered-id"]
        end
    end
    return nil
end

local removed = 0

local function purge(key)
    local from = last_delivered(key)
    if not from or redis.call("XPENDING", key, group)[1] == 0 then
        removed = removed + redis.call("XTRIM", key, "MAXLEN", 0)
        return
    end
    repeat
        local rows = redis.call("XPENDING", key, group, "-", "+", math.min(most - removed, 1000), back)
        local ids = {}
        for i, row in ipairs(rows) do
            ids[i] = row[1]
        end
        if #ids > 0 then
            redis.call("XACK", key, group, unpack(ids))
            removed = removed + redis.call("XDEL", key, unpack(ids))
        end
    until #rows == 0 or removed >= most
    while removed < most do
        local entries = redis.call("XRANGE", key, "(" .. from, "+", "COUNT", math.min(most - removed, 1000))
        local ids = {}
        for i, entry in ipairs(entries) do
            ids[i] = entry[1]
        end
        if #ids == 0 then
            return
        end
        removed = removed + redis.call("XDEL", key, unpack(ids))
    end
end

for _, key in ipairs(KEYS) do
    if removed < most and redis.call("EXISTS", key) == 1 then
        purge(key)
    end
end
return removed
