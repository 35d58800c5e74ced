-- Version 2: a version that is asked for again, because no answer came, is the one of before.

ALTER TABLE policies ADD COLUMN request_id TEXT COLLATE "C";
