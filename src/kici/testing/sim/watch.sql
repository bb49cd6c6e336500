-- Tells a simulation of every row that moves: it sees what was written, whoever wrote it and in whatever statement.

CREATE TEMP TRIGGER watch_job_added AFTER INSERT ON main.jobs BEGIN
    SELECT watch_job(
        NEW.id, NEW.run_id, NEW.name, NULL, NEW.status, NULL, NEW.agent_id,
        NEW.exit_code, NEW.signal, NEW.reason, NEW.attempts, NEW.attempts
    );
END;

CREATE TEMP TRIGGER watch_job_moved AFTER UPDATE ON main.jobs
WHEN OLD.status <> NEW.status OR OLD.agent_id IS NOT NEW.agent_id OR OLD.attempts <> NEW.attempts
BEGIN
    SELECT watch_job(
        NEW.id, NEW.run_id, NEW.name, OLD.status, NEW.status, OLD.agent_id, NEW.agent_id,
        NEW.exit_code, NEW.signal, NEW.reason, OLD.attempts, NEW.attempts
    );
END;

CREATE TEMP TRIGGER watch_job_deleted AFTER DELETE ON main.jobs BEGIN
    SELECT watch_job(
        OLD.id, OLD.run_id, OLD.name, OLD.status, NULL, OLD.agent_id, NULL,
        NULL, NULL, NULL, OLD.attempts, OLD.attempts
    );
END;

CREATE TEMP TRIGGER watch_run_added AFTER INSERT ON main.runs BEGIN
    SELECT watch_run(NEW.id, NULL, NEW.status);
END;

CREATE TEMP TRIGGER watch_run_moved AFTER UPDATE ON main.runs WHEN OLD.status <> NEW.status BEGIN
    SELECT watch_run(NEW.id, OLD.status, NEW.status);
END;

CREATE TEMP TRIGGER watch_spawn_added AFTER INSERT ON main.scaler_spawning_agents BEGIN
    SELECT watch_spawn(NEW.agent_id, NEW.scaler_name, NULL, NEW.state, NEW.bound_job_id, NEW.end_reason);
END;

CREATE TEMP TRIGGER watch_spawn_moved AFTER UPDATE ON main.scaler_spawning_agents WHEN OLD.state <> NEW.state BEGIN
    SELECT watch_spawn(NEW.agent_id, NEW.scaler_name, OLD.state, NEW.state, NEW.bound_job_id, NEW.end_reason);
END;

CREATE TEMP TRIGGER watch_spawn_deleted AFTER DELETE ON main.scaler_spawning_agents BEGIN
    SELECT watch_spawn(OLD.agent_id, OLD.scaler_name, OLD.state, NULL, OLD.bound_job_id, OLD.end_reason);
END;

CREATE TEMP TRIGGER watch_reservation_added AFTER INSERT ON main.scaler_reservations BEGIN
    SELECT watch_reservation(NEW.agent_id, 1);
END;

CREATE TEMP TRIGGER watch_reservation_deleted AFTER DELETE ON main.scaler_reservations BEGIN
    SELECT watch_reservation(OLD.agent_id, 0);
END;

CREATE TEMP TRIGGER watch_log_added AFTER INSERT ON main.log_chunks WHEN NEW.stream <> 3 BEGIN
    SELECT watch_log(NEW.job_id, NEW.stream, NEW.byte_offset, NEW.data);
END;

CREATE TEMP TRIGGER watch_session_added AFTER INSERT ON main.agent_sessions BEGIN
    SELECT watch_session(NEW.agent_id, NULL, NEW.connection_id);
END;

CREATE TEMP TRIGGER watch_session_moved AFTER UPDATE ON main.agent_sessions BEGIN
    SELECT watch_session(NEW.agent_id, OLD.connection_id, NEW.connection_id);
END;

CREATE TEMP TRIGGER watch_session_deleted AFTER DELETE ON main.agent_sessions BEGIN
    SELECT watch_session(OLD.agent_id, OLD.connection_id, NULL);
END;

CREATE TEMP TRIGGER watch_event_added AFTER INSERT ON main.kici_events BEGIN
    SELECT watch_event(NEW.id, NEW.name, NEW.subject, NEW.target, NULL, NEW.state, NEW.dead_reason);
END;

CREATE TEMP TRIGGER watch_event_moved AFTER UPDATE ON main.kici_events WHEN OLD.state <> NEW.state BEGIN
    SELECT watch_event(NEW.id, NEW.name, NEW.subject, NEW.target, OLD.state, NEW.state, NEW.dead_reason);
END;

CREATE TEMP TRIGGER watch_token_added AFTER INSERT ON main.agent_tokens BEGIN
    SELECT watch_token(NEW.agent_id);
END;

CREATE TEMP TRIGGER watch_failure_added AFTER INSERT ON main.scaler_counted_failures BEGIN
    SELECT watch_failure(NEW.scaler_name, NEW.agent_id);
END;

CREATE TEMP TRIGGER watch_lease_added AFTER INSERT ON main.leases BEGIN
    SELECT watch_lease(NULL, NULL, NEW.holder, NEW.token);
END;

CREATE TEMP TRIGGER watch_lease_moved AFTER UPDATE ON main.leases BEGIN
    SELECT watch_lease(OLD.holder, OLD.token, NEW.holder, NEW.token);
END;

CREATE TEMP TRIGGER watch_adopted AFTER UPDATE ON main.scaler_spawning_agents
WHEN OLD.adopted_by IS NOT NULL AND OLD.adopted_by IS NOT NEW.adopted_by
BEGIN
    SELECT watch_adoption(
        NEW.agent_id, OLD.adopted_by, NEW.adopted_by,
        EXISTS (
            SELECT 1 FROM agent_sessions
            JOIN cluster_instances ON cluster_instances.instance_id = agent_sessions.instance_id
            WHERE agent_sessions.agent_id = NEW.agent_id AND agent_sessions.instance_id = OLD.adopted_by
                AND cluster_instances.last_beat_at > now_ms() - 45000
        )
    );
END;
