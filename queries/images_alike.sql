-- Which image stood for different numbers of tokens, in one place or another?
-- parameters: none
-- grain: one row per image
-- empty when all is well
with shown as (
    select segment_id, medium.payload_digest, medium.len from (select segment_id, unnest(media) as medium from segments) where medium.name = 'image'
),
answer as (
    select payload_digest, min(len) as fewest, max(len) as most, count(*) as num_times, min(segment_id) as segment_id
    from shown group by payload_digest having min(len) <> max(len)
)
select * from answer
