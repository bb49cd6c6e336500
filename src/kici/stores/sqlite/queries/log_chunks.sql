-- name: append_log
-- Store output chunks of existing jobs; one that is already there is left as it is.
INSERT INTO log_chunks (job_id, stream, byte_offset, received_at, data)
SELECT :job_id, :stream, :byte_offset, COALESCE(:now, now_ms()), :data
WHERE EXISTS (SELECT 1 FROM jobs WHERE id = :job_id)
ON CONFLICT (job_id, stream, byte_offset) DO NOTHING;

-- name: log_ends
-- End of each stream of a job.
SELECT log_chunks.stream, log_chunks.byte_offset + length(log_chunks.data) AS ends
FROM json_each('[1, 2, 3]') AS each_stream JOIN log_chunks ON log_chunks.position = (
    SELECT last.position FROM log_chunks AS last
    WHERE last.job_id = :job_id AND last.stream = each_stream.value
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
