-- How often a job was offered: tells one claim of it from a later one.
ALTER TABLE jobs ADD COLUMN offers INTEGER NOT NULL DEFAULT 0;
