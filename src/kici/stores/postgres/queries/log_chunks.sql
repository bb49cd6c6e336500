-- name: lock_logs
-- Let appends to these jobs take turns: each sees where the one before ended, and positions are in order of commit.
SELECT pg_advisory_xact_lock(hashtextextended(job.id, 0))
FROM (SELECT value AS id FROM json_array_elements_text(:job_ids::JSON) ORDER BY value) AS job;

-- name: append_log
-- Store an output chunk of an existing job, if it starts where its stream ends (the orchestrator's own lines always).
INSERT INTO log_chunks (job_id, stream, byte_offset, received_at, data)
SELECT :job_id, :stream::SMALLINT, :byte_offset::BIGINT, COALESCE(:now, now_ms()), :data::BYTEA
WHERE EXISTS (SELECT 1 FROM jobs WHERE id = :job_id)
    AND (:stream::SMALLINT = 3 OR :byte_offset::BIGINT = COALESCE((
        SELECT byte_offset + octet_length(data) FROM log_chunks
        WHERE job_id = :job_id AND stream = :stream::SMALLINT
        ORDER BY byte_offset DESC
        LIMIT 1
    ), 0))
ON CONFLICT (job_id, stream, byte_offset) DO NOTHING;

-- name: log_ends
-- End of each stream of some jobs.
SELECT job.id AS job_id, each_stream.stream, last.ends
FROM (SELECT value AS id FROM json_array_elements_text(:job_ids::JSON)) AS job
CROSS JOIN (VALUES (1), (2), (3)) AS each_stream (stream)
CROSS JOIN LATERAL (
    SELECT byte_offset + octet_length(data) AS ends FROM log_chunks
    WHERE log_chunks.job_id = job.id AND log_chunks.stream = each_stream.stream
    ORDER BY byte_offset DESC
    LIMIT 1
) AS last;

-- name: read_log
-- Chunks of a job after a position: the first, and those that still fit.
SELECT position, stream, byte_offset, received_at, data
FROM (
    SELECT
        following.*,
        sum(octet_length(data)) OVER (ORDER BY position) AS total,
        row_number() OVER (ORDER BY position) AS nth
    FROM (
        SELECT * FROM log_chunks
        WHERE job_id BETWEEN :job_id AND :job_id AND position > :after
        ORDER BY job_id, position
        LIMIT :chunks_max
    ) AS following
) AS sized
WHERE nth = 1 OR total <= :bytes_max::BIGINT
ORDER BY position;
