-- A hint to the other coordinators: channel, payload.
SELECT pg_notify($1, $2);
