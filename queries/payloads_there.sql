-- Which payloads does a segment name that the log does not hold?
-- parameters: none
-- grain: one row per segment and payload
-- empty when all is well
with named as (
    select segment_id, 'routing' as name, routing_digest as payload_digest from segments where routing_digest is not null
    union all
    select segment_id, medium.name, medium.payload_digest from (select segment_id, unnest(media) as medium from segments)
),
answer as (
    select named.* from named anti join payloads using (payload_digest)
)
select * from answer
