-- When a class was last submitted, to a day: one whose jobs have all been deleted can go, too.
ALTER TABLE demand_classes ADD COLUMN used_at INTEGER NOT NULL DEFAULT 0;
UPDATE demand_classes SET used_at = now_ms();
CREATE INDEX demand_classes_used ON demand_classes (used_at);
