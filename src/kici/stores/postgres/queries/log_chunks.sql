-- name: append_log
-- Store an output chunk of an existing job, if it starts where its stream ends (the orchestrator's own lines always).
-- Appends to one job take turns, or a follower could pass a position that is committed later.
WITH turn AS MATERIALIZED (
    SELECT pg_advisory_xact_lock(hashtextextended(:job_id, 0))
)
INSERT INTO log_chunks (job_id, stream, byte_offset, received_at, data)
SELECT :job_id, :stream::SMALLINT, :byte_offset::BIGINT, COALESCE(:now, now_ms()), :data::BYTEA
FROM turn
WHERE EXISTS (SELECT 1 FROM jobs WHERE id = :job_id)
    AND (:stream::SMALLINT = 3 OR :byte_offset::BIGINT = COALESCE((
        SELECT byte_offset + octet_length(data) FROM log_chunks
        WHERE job_id = :job_id AND stream = :stream::SMALLINT
        ORDER BY byte_offset DESC
        LIMIT 1
    ), 0))
ON CONFLICT (job_id, stream, byte_offset) DO NOTHING;

-- name: log_ends
-- End of each stream of a job.
SELECT each_stream.stream, last.ends
FROM (VALUES (1), (2), (3)) AS each_stream (stream)
CROSS JOIN LATERAL (
    SELECT byte_offset + octet_length(data) AS ends FROM log_chunks
    WHERE job_id = :job_id AND log_chunks.stream = each_stream.stream
    ORDER BY byte_offset DESC
    LIMIT 1
) AS last;

-- name: read_log
-- Chunks of a job after a position: the first, and those that still fit.
SELECT log_chunks.*
FROM (
    SELECT
        position,
        sum(octet_length(data)) OVER (ORDER BY position) AS total,
        row_number() OVER (ORDER BY position) AS nth
    FROM (
        SELECT position, data FROM log_chunks
        WHERE job_id = :job_id AND position > :after
        ORDER BY position
        LIMIT :chunks_max
    ) AS following
) AS sized JOIN log_chunks ON log_chunks.position = sized.position
WHERE sized.nth = 1 OR sized.total <= :bytes_max::BIGINT
ORDER BY log_chunks.position;
