-- name: lock_logs
-- Appends take turns: here by themselves, since one connection writes.
SELECT json_array_length(:job_ids) AS jobs;

-- name: append_log
-- Store an output chunk of an existing job, if it starts where its stream ends (the orchestrator's own lines always).
INSERT INTO log_chunks (job_id, stream, byte_offset, received_at, data)
SELECT :job_id, :stream, :byte_offset, COALESCE(:now, now_ms()), :data
WHERE EXISTS (SELECT 1 FROM jobs WHERE id = :job_id)
    AND (:stream = 3 OR :byte_offset = COALESCE((
        SELECT byte_offset + length(data) FROM log_chunks
        WHERE job_id = :job_id AND stream = :stream
        ORDER BY byte_offset DESC
        LIMIT 1
    ), 0))
ON CONFLICT (job_id, stream, byte_offset) DO NOTHING;

-- name: log_ends
-- End of each stream of some jobs.
SELECT log_chunks.job_id, log_chunks.stream, log_chunks.byte_offset + length(log_chunks.data) AS ends
FROM json_each(:job_ids) AS job
CROSS JOIN json_each('[1, 2, 3]') AS each_stream
JOIN log_chunks ON log_chunks.position = (
    SELECT last.position FROM log_chunks AS last
    WHERE last.job_id = job.value AND last.stream = each_stream.value
    ORDER BY last.byte_offset DESC
    LIMIT 1
);

-- name: read_log
-- Chunks of a job after a position: the first, and those that still fit.
SELECT log_chunks.*
FROM (
    SELECT position, sum(length(data)) OVER (ORDER BY position) AS total, row_number() OVER (ORDER BY position) AS nth
    FROM (
        SELECT position, data FROM log_chunks INDEXED BY log_chunks_of_job
        WHERE job_id = :job_id AND position > :after
        ORDER BY position
        LIMIT :chunks_max
    )
) AS sized JOIN log_chunks ON log_chunks.position = sized.position
WHERE sized.nth = 1 OR sized.total <= :bytes_max
ORDER BY log_chunks.position;
