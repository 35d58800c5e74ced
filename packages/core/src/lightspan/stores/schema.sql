-- Version 1 of a lightspan store file. Split at semicolons, so no triggers here.

CREATE TABLE resources (
    resources_id TEXT PRIMARY KEY,
    body BLOB NOT NULL
) WITHOUT ROWID;

CREATE TABLE policies (
    policy TEXT NOT NULL,
    version INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    PRIMARY KEY (policy, version)
) WITHOUT ROWID;

-- What moves is apart from what does not: a task of 100 kB is written once.
CREATE TABLE rollouts (
    position INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL,
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
CREATE INDEX rollouts_by_run ON rollouts (run_id, status);
CREATE INDEX rollouts_queued ON rollouts (position) WHERE status = 'queued';
CREATE INDEX rollouts_queued_by_run ON rollouts (run_id, position) WHERE status = 'queued';

CREATE TABLE rollout_bodies (
    position INTEGER PRIMARY KEY,
    body BLOB NOT NULL
);

CREATE TABLE attempts (
    position INTEGER PRIMARY KEY,
    attempt_id TEXT NOT NULL UNIQUE,
    rollout_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    status TEXT NOT NULL,
    runner_id TEXT NOT NULL,
    call_token TEXT NOT NULL UNIQUE,
    lease_until REAL NOT NULL,
    started_at REAL NOT NULL,
    ended_at REAL,
    reward BLOB,
    outcome TEXT,
    message TEXT NOT NULL,
    damage BLOB NOT NULL,
    UNIQUE (rollout_id, number)
);
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

-- What became of a call after it was written; most calls have no row.
CREATE TABLE call_outcomes (
    attempt INTEGER NOT NULL,
    call_id TEXT NOT NULL,
    outcome TEXT NOT NULL,
    PRIMARY KEY (attempt, call_id)
) WITHOUT ROWID;
