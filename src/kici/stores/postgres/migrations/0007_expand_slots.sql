-- Whether an event scaler may have one more agent in the whole cluster, asked under its lock, which is held to the end
-- of the transaction.  A function, because each statement of one sees what was committed until it began: a count that
-- is part of the statement that waits for the lock would be as of before the wait.
CREATE FUNCTION has_event_slot(
    lock_name TEXT, lock_wait_ms BIGINT, scaler TEXT, agents_max BIGINT, may_probe BOOLEAN, at_ms BIGINT
) RETURNS BOOLEAN LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM set_config('lock_timeout', lock_wait_ms::TEXT, TRUE);
    PERFORM pg_advisory_xact_lock(hashtextextended(lock_name, 0));
    RETURN (
            SELECT count(*) FROM scaler_spawning_agents AS spawn
            WHERE spawn.scaler_name = scaler AND spawn.backend_type = 'event'
        ) < agents_max
        AND NOT EXISTS (
            SELECT 1 FROM scaler_deferrals AS deferral
            WHERE deferral.scaler_name = scaler AND deferral.failures > 0 AND (
                (deferral.until > at_ms AND NOT may_probe)
                OR EXISTS (
                    SELECT 1 FROM scaler_spawning_agents AS probe
                    WHERE probe.agent_id = deferral.probe_agent_id AND probe.state = 'booting'
                )
            )
        );
END $$;
