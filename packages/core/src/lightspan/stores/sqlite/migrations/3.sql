-- From version 2: a version that is asked for again, because no answer came, is the one of before.
-- Who wrote version 2 and has the file open still can go on writing.

ALTER TABLE policies ADD COLUMN request_id TEXT;
