-- Claims, renews, confirms or releases an event of a consumer. One command, one key, atomic.
--
-- KEYS[1]  pf:evt:processed:<consumer>:<event_id>
--            absent               not handled yet, or its TTL has expired
--            processing:<owner>   in progress by <owner>; expires with the lease
--            done:<owner>         handled; expires with the TTL
-- ARGV[1]  claim | renew | confirm | release | mark
-- ARGV[2]  owner
-- ARGV[3]  milliseconds: the lease (claim, renew) or the TTL (confirm, mark); 0 for release
--
-- Returns "ours", "done", "held" or "gone": the state of the key for <owner>.

local key, does, owner, ms = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local processing, done = "processing:" .. owner, "done:" .. owner
local found = redis.call("GET", key)

if does == "mark" then -- the ticket's SET key value NX EX ttl
    if not found then
        redis.call("SET", key, done, "NX", "PX", ms)
        return "ours"
    end
elseif does == "claim" then
    if not found or found == processing then
        redis.call("SET", key, processing, "PX", ms)
        return "ours"
    end
elseif does == "renew" then
    -- Not if it is gone: a renewal after the release must not claim it again.
    if not found then
        return "gone"
    elseif found == processing then
        redis.call("PEXPIRE", key, ms)
        return "ours"
    end
elseif does == "confirm" then
    -- Absent: the lease expired and no other owner has claimed it; the effects have happened.
    -- Done by us: the reply of an earlier confirm was lost.
    if not found or found == processing or found == done then
        redis.call("SET", key, done, "PX", ms)
        return "ours"
    end
elseif does == "release" then
    if found == processing then
        redis.call("DEL", key)
    end
    return "ours"
end

if string.sub(found, 1, 11) == "processing:" then
    return "held"
end
return "done"
