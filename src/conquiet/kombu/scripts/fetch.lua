-- Ack entries, then take up to a number of messages in the order of the streams: of each stream
-- first the entries that were given back, then those that were never delivered.
--
-- KEYS[1]      <ns>leases     sorted set: consumer -> the millisecond at which its lease ends
-- KEYS[2..]    the streams to read, the most urgent first; then the streams of the acks
-- ARGV[1]      group
-- ARGV[2]      consumer
-- ARGV[3]      consumer that holds entries which were given back
-- ARGV[4]      milliseconds that the lease lasts
-- ARGV[5]      how many messages to take at most
-- ARGV[6]      deliveries after which a message is a dead letter; 0 for no limit
-- ARGV[7]      <ns>
-- ARGV[8]      "1": create missing streams and groups
-- ARGV[9]      n, the number of streams to read
-- ARGV[9+i]    milliseconds of x-expires of the queue of stream i, or empty
-- ARGV[10+n..] of each stream of the acks: how many, and the ids
--
-- Returns {more, stream index, id, redelivered, message, stream index, ...}; `more` is 1 if there
-- may be ready messages although fewer are returned than were asked for.

local group, me, back, ns = ARGV[1], ARGV[2], ARGV[3], ARGV[7]
local budget, limit, streams = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[9])
local MOST_LOOKED_AT = 1000

local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function settle(key, ids)
    redis.call("XACK", key, group, unpack(ids))
    redis.call("XDEL", key, unpack(ids))
end

local at = 10 + streams
for i = 2 + streams, #KEYS do
    local ids = {}
    for j = 1, tonumber(ARGV[at]) do
        ids[j] = ARGV[at + j]
    end
    at = at + 1 + #ids
    settle(KEYS[i], ids)
end

-- A lease that has ended is left to renew.lua, which reports it.
local ends = redis.call("ZSCORE", KEYS[1], me)
if ends and tonumber(ends) > now then
    -- A server without memory refuses this, but not the reads, which free memory.
    redis.pcall("ZADD", KEYS[1], "GT", string.format("%.0f", now + tonumber(ARGV[4])), me)
end

local function bury(key, id, fields, reason, deliveries)
    local priority, queue = string.match(string.sub(key, #ns + 1), "^q:(%d+):(.*)$")
    local letter = { "queue", queue, "id", id, "reason", reason, "deliveries", deliveries,
        "priority", priority }
    for _, part in ipairs(fields) do
        letter[#letter + 1] = part
    end
    redis.call("XADD", ns .. "dead:" .. queue, "*", unpack(letter))
    settle(key, { id })
end

local answer = { 0 }
local looked_at = 0

-- Return an entry, unless it has expired or is malformed.
local function take(index, key, id, fields, redelivered, deliveries)
    looked_at = looked_at + 1
    local message, expires, earlier = nil, nil, 0
    for i = 1, #fields, 2 do
        local name = fields[i]
        if name == "m" then
            message = fields[i + 1]
        elseif name == "e" then
            expires = tonumber(fields[i + 1])
        elseif name == "n" then
            redelivered, earlier = 1, tonumber(fields[i + 1]) or 0
        end
    end
    if not message then
        bury(key, id, fields, "it has no field m, so it is no message of this transport", deliveries)
    elseif expires and expires <= now then
        settle(key, { id })
    elseif limit > 0 and deliveries + earlier > limit then
        local reason = "it was delivered " .. (deliveries + earlier - 1) .. " times, and never acked"
        bury(key, id, fields, reason, deliveries + earlier - 1)
    else
        local n = #answer
        answer[n + 1], answer[n + 2], answer[n + 3], answer[n + 4] = index, id, redelivered, message
        budget = budget - 1
    end
end

local function take_given_back(index, key)
    while budget > 0 and looked_at < MOST_LOOKED_AT do
        local rows = redis.call("XPENDING", key, group, "-", "+", math.min(budget, 100), back)
        if #rows == 0 then
            return
        end
        local ids, deliveries = {}, {}
        for i, row in ipairs(rows) do
            ids[i] = row[1]
            deliveries[row[1]] = tonumber(row[4]) + 1
        end
        for _, entry in ipairs(redis.call("XCLAIM", key, group, me, 0, unpack(ids))) do
            if entry then
                take(index, key, entry[1], entry[2], 1, deliveries[entry[1]])
                deliveries[entry[1]] = nil
            end
        end
        for id in pairs(deliveries) do -- deleted by another client
            redis.call("XACK", key, group, id)
        end
    end
end

local function take_new(index, key)
    while budget > 0 and looked_at < MOST_LOOKED_AT do
        local wanted = math.min(budget, 100)
        local reply = redis.call(
            "XREADGROUP", "GROUP", group, me, "COUNT", wanted, "STREAMS", key, ">")
        if not reply then
            return
        end
        local entries = reply[1][2]
        for _, entry in ipairs(entries) do
            take(index, key, entry[1], entry[2], 0, 1)
        end
        if #entries < wanted then
            return
        end
    end
end

for i = 1, streams do
    local key, expires = KEYS[1 + i], ARGV[9 + i]
    local length = redis.call("XLEN", key)
    if ARGV[8] == "1" or (length > 0 and redis.pcall("XPENDING", key, group, "-", "+", 1, back).err) then
        redis.pcall("XGROUP", "CREATE", key, group, "0", "MKSTREAM")
    end
    if expires ~= "" then
        redis.call("PEXPIRE", key, expires)
    end
    if length > 0 and budget > 0 then
        take_given_back(i, key)
        take_new(i, key)
    end
end
if looked_at >= MOST_LOOKED_AT and budget > 0 then
    answer[1] = 1
end
return answer
