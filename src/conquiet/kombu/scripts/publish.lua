-- Append a message to any number of queues, each with the settings that it was declared with.
--
-- KEYS[1]    <ns>queues            hash: queue -> "<x-expires>|<x-message-ttl>|<x-max-length>"
-- KEYS[1+i]  <ns>q:<priority>:<queue i>
-- ARGV[1]    group
-- ARGV[2]    <ns>
-- ARGV[3]    the message
-- ARGV[4]    milliseconds to live, or empty
-- ARGV[5]    "1": only to queues that were declared (fanout); else missing queues are created
-- ARGV[6]    consumer that holds entries which were given back
-- ARGV[6+i]  queue i
--
-- Returns the names of the queues whose x-expires has passed.

local group, ns, message, lives, declared_only = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == "1"
local back = ARGV[6]

local function now()
    local time = redis.call("TIME")
    return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function add(key, ttl)
    if ttl then
        return redis.call("XADD", key, "*", "m", message, "e", string.format("%.0f", now() + ttl))
    end
    return redis.call("XADD", key, "*", "m", message)
end

local function last_delivered(key)
    local ok = redis.pcall("XINFO", "GROUPS", key)
    if ok.err then
        return nil
    end
    for _, fields in ipairs(ok) do
        local found = {}
        for i = 1, #fields, 2 do
            found[fields[i]] = fields[i + 1]
        end
        if found["name"] == group then
            return found["last-delivered-id"]
        end
    end
    return "0-0"
end

local function given_back(key, count)
    local found = redis.pcall("XPENDING", key, group, "-", "+", count, back)
    return found.err and {} or found
end

-- Return up to `most` of the oldest ready entries of a stream, oldest first.
local function oldest(key, most)
    local ids, fields = {}, {}
    for _, row in ipairs(given_back(key, most)) do
        local entry = redis.call("XRANGE", key, row[1], row[1])[1]
        ids[#ids + 1] = row[1]
        fields[#fields + 1] = entry and entry[2] or {}
    end
    local from = last_delivered(key)
    if from and #ids < most then
        for _, entry in ipairs(redis.call("XRANGE", key, "(" .. from, "+", "COUNT", most - #ids)) do
            ids[#ids + 1] = entry[1]
            fields[#fields + 1] = entry[2]
        end
    end
    return ids, fields
end

local function drop(key, id)
    redis.call("XACK", key, group, id)
    redis.call("XDEL", key, id)
end

local function drop_expired(key)
    local at = now()
    local ids, fields = oldest(key, 10)
    for i, id in ipairs(ids) do
        for j = 1, #fields[i], 2 do
            if fields[i][j] == "e" and tonumber(fields[i][j + 1]) <= at then
                drop(key, id)
            end
        end
    end
end

local function ready(key)
    local length = redis.call("XLEN", key)
    local pending = length > 0 and redis.pcall("XPENDING", key, group) or { 0 }
    if pending.err then
        return length
    end
    length = length - pending[1]
    for _, row in ipairs(pending[4] or {}) do
        if row[1] == back then
            length = length + tonumber(row[2])
        end
    end
    return length
end

-- Drop from the lowest priority first, and of it the oldest, as RabbitMQ does by default.
local function keep_at_most(queue, most)
    local total, sizes = 0, {}
    for priority = 0, 9 do
        sizes[priority] = ready(ns .. "q:" .. priority .. ":" .. queue)
        total = total + sizes[priority]
    end
    for priority = 9, 0, -1 do
        local key = ns .. "q:" .. priority .. ":" .. queue
        while total > most and sizes[priority] > 0 do
            local ids = oldest(key, math.min(total - most, 100))
            if #ids == 0 then
                break
            end
            for _, id in ipairs(ids) do
                drop(key, id)
            end
            total, sizes[priority] = total - #ids, sizes[priority] - #ids
        end
    end
end

local gone = {}
for i = 2, #KEYS do
    local key, queue = KEYS[i], ARGV[5 + i]
    local settings = redis.call("HGET", KEYS[1], queue)
    if not settings and not declared_only then
        redis.call("HSET", KEYS[1], queue, "")
        settings = ""
    end
    if settings == "" or settings == "||" then
        add(key, tonumber(lives))
    elseif settings then
        local expires, ttl, most = string.match(settings, "^(%d*)|(%d*)|(%d*)$")
        ttl, most = tonumber(ttl), tonumber(most)
        if tonumber(lives) and (not ttl or tonumber(lives) < ttl) then
            ttl = tonumber(lives)
        end
        -- Declaring a queue creates its stream of priority 0, so that its TTL is that of the queue.
        local left = expires ~= "" and redis.call("PTTL", ns .. "q:0:" .. queue) or -1
        if left == -2 then
            gone[#gone + 1] = queue
        else
            if ttl then
                drop_expired(key)
            end
            add(key, ttl)
            if left > 0 then
                redis.call("PEXPIRE", key, left)
            end
            if most then
                keep_at_most(queue, most)
            end
        end
    end
end
return gone
