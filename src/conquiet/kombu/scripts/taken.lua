-- Find the entries that a consumer had, and that others took over, or have finished since.
--
-- KEYS[1]   a stream
-- ARGV[1]   group
-- ARGV[2]   consumer
-- ARGV[3..] ids
--
-- Returns the ids of those entries.

local taken = {}
for i = 3, #ARGV do
    local rows = redis.pcall("XPENDING", KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
    if rows.err or not rows[1] then
        taken[#taken + 1] = ARGV[i]
    end
end
return taken
