-- Format 6 of a lightspan store file. Split at semicolons, so no triggers here.

CREATE TABLE resources (
    resources_id TEXT PRIMARY KEY,
    body BLOB NOT NULL
) WITHOUT ROWID;

CREATE TABLE policies (
    policy TEXT NOT NULL,
    version INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    request_id TEXT,
    PRIMARY KEY (policy, version)
) WITHOUT ROWID;

-- Columns that change have their own table, so that a task of 100 kB is written once. `queued` repeats
-- a part of `status`: a report does not change it, so it need not update its index. It is 2 if the
-- rollout must run alone.
CREATE TABLE rollouts (
    position INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL,
    queued INTEGER NOT NULL,
    mode TEXT NOT NULL,
    step INTEGER NOT NULL,
    max_infrastructure_tries INTEGER NOT NULL,
    status TEXT NOT NULL,
    created_at REAL NOT NULL,
    change INTEGER NOT NULL,
    infrastructure_tries INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    attempt_id TEXT,
    finished_at REAL
);
CREATE INDEX rollouts_by_change ON rollouts (change);
CREATE INDEX rollouts_by_run ON rollouts (run_id, queued, position);

CREATE TABLE rollout_bodies (
    position INTEGER PRIMARY KEY,
    body BLOB NOT NULL
);

-- Each change of an index writes a page, so attempts have one key only: a call token begins with their
-- id, a rollout has the id of its latest attempt, and each attempt that of the one before. `position`
-- is 2^20 times the rollout's plus the attempt's number.
CREATE TABLE attempts (
    attempt_id TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    previous TEXT,
    rollout_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    status TEXT NOT NULL,
    runner_id TEXT NOT NULL,
    call_token TEXT NOT NULL,
    lease_until REAL NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL,
    reward BLOB,
    outcome TEXT,
    message TEXT NOT NULL,
    capture_errors BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX attempts_by_lease ON attempts (lease_until, position) WHERE status = 'running';

-- `attempt` below is attempts.position: eight bytes in each index entry instead of 35.
CREATE TABLE spans (
    position INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL,
    span_id TEXT NOT NULL,
    call_id TEXT NOT NULL,
    late INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (attempt, span_id)
);

CREATE TABLE token_records (
    position INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL,
    call_id TEXT NOT NULL,
    choice INTEGER NOT NULL,
    sequence_start INTEGER NOT NULL,
    late INTEGER NOT NULL,
    head BLOB NOT NULL,
    prompt BLOB NOT NULL,
    response BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    UNIQUE (attempt, call_id, choice)
);

-- Outcomes of calls that changed after they were written; most calls have no row. With `call_id`
-- '(feedback)' or '(feedback, of a call)' it is instead the last feedback on the attempt, as JSON.
CREATE TABLE call_outcomes (
    attempt INTEGER NOT NULL,
    call_id TEXT NOT NULL,
    outcome TEXT NOT NULL,
    PRIMARY KEY (attempt, call_id)
) WITHOUT ROWID;

-- Processes that use the store.
CREATE TABLE peers (
    peer_id TEXT PRIMARY KEY,
    seen_at REAL NOT NULL,
    body BLOB NOT NULL
) WITHOUT ROWID;

-- Images of calls, by the SHA-256 digest of their bytes, and the attempts that have them.
CREATE TABLE IF NOT EXISTS images (
    digest TEXT PRIMARY KEY,
    media_type TEXT NOT NULL,
    data BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS attempt_images (
    digest TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    PRIMARY KEY (digest, attempt)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS attempt_images_by_attempt ON attempt_images (attempt);
