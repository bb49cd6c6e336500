-- Tells a later connection of an agent's program from an earlier one whose registration arrives late.
ALTER TABLE agent_sessions ADD COLUMN incarnation TEXT NOT NULL DEFAULT '';
ALTER TABLE agent_sessions ADD COLUMN connection_number INTEGER NOT NULL DEFAULT 0;
