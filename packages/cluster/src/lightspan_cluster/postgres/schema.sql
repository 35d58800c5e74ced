-- Version 5 of a lightspan schema. The file is split at semicolons, so it must not define functions.
-- Texts are compared byte by byte, as in every store. Texts that may hold any character, NUL included,
-- are BYTEA.

CREATE TABLE lightspan_versions (
    version BIGINT PRIMARY KEY,
    lightspan TEXT NOT NULL,
    made_at TIMESTAMPTZ NOT NULL DEFAULT now()
);

CREATE TABLE resources (
    resources_id TEXT COLLATE "C" PRIMARY KEY,
    body BYTEA NOT NULL
);

CREATE TABLE policies (
    policy TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL,
    run_id TEXT COLLATE "C" NOT NULL,
    step BIGINT NOT NULL,
    request_id TEXT COLLATE "C",
    PRIMARY KEY (policy, version)
);

-- One row, locked first by every transaction that moves something. So changes are committed in the
-- order of their numbers, and a watcher that has read one has read all before it. The numbers of a
-- sequence would be committed in any order, and a watcher would miss some.
CREATE TABLE ends (
    single BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (single),
    change BIGINT NOT NULL,
    position BIGINT NOT NULL
) WITH (fillfactor = 10);
INSERT INTO ends (change, position) VALUES (0, 0);

-- Columns that change are in another table than the body, so that a task of 100 kB is written once.
-- `queued` is 1 for a queued rollout and 2 for one that must run alone.
CREATE TABLE rollouts (
    position BIGINT PRIMARY KEY,
    rollout_id TEXT COLLATE "C" NOT NULL UNIQUE,
    run_id TEXT COLLATE "C" NOT NULL,
    queued SMALLINT NOT NULL,
    mode TEXT COLLATE "C" NOT NULL,
    step BIGINT NOT NULL,
    max_infrastructure_tries BIGINT NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    change BIGINT NOT NULL,
    infrastructure_tries BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    attempt_id TEXT COLLATE "C",
    finished_at DOUBLE PRECISION
);
CREATE INDEX rollouts_by_change ON rollouts (change);
CREATE INDEX rollouts_by_run ON rollouts (run_id, queued, position);

CREATE TABLE rollout_bodies (
    position BIGINT PRIMARY KEY,
    body BYTEA NOT NULL
);

-- A rollout names its latest attempt, and each attempt the previous one. `position` is 2^20 times that
-- of its rollout plus `number`.
CREATE TABLE attempts (
    attempt_id TEXT COLLATE "C" PRIMARY KEY,
    position BIGINT NOT NULL,
    previous TEXT COLLATE "C",
    rollout_id TEXT COLLATE "C" NOT NULL,
    number BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    runner_id TEXT COLLATE "C" NOT NULL,
    call_token TEXT COLLATE "C" NOT NULL,
    lease_until DOUBLE PRECISION NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    ended_at DOUBLE PRECISION,
    reward BYTEA,
    outcome TEXT COLLATE "C",
    message BYTEA NOT NULL,
    capture_errors BYTEA NOT NULL
);
CREATE INDEX attempts_by_lease ON attempts (lease_until, position) WHERE status = 'running';

-- `attempt` is attempts.position: 8 bytes in each index entry instead of the 35 of an id.
CREATE TABLE spans (
    position BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    attempt BIGINT NOT NULL,
    span_id TEXT COLLATE "C" NOT NULL,
    call_id TEXT COLLATE "C" NOT NULL,
    late BOOLEAN NOT NULL,
    body BYTEA NOT NULL,
    UNIQUE (attempt, span_id)
);

CREATE TABLE token_records (
    position BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    attempt BIGINT NOT NULL,
    call_id TEXT COLLATE "C" NOT NULL,
    choice BIGINT NOT NULL,
    sequence_start BIGINT NOT NULL,
    late BOOLEAN NOT NULL,
    head BYTEA NOT NULL,
    prompt BYTEA NOT NULL,
    response BYTEA NOT NULL,
    logprobs BYTEA NOT NULL,
    UNIQUE (attempt, call_id, choice)
);

-- Outcomes of calls that were set after the call was written; most calls have no row. With `call_id`
-- '(feedback)' or '(feedback, of a call)' it is instead the last feedback on the attempt, as JSON.
CREATE TABLE call_outcomes (
    attempt BIGINT NOT NULL,
    call_id TEXT COLLATE "C" NOT NULL,
    outcome TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (attempt, call_id)
);

-- Trainers and runners that announced themselves.
CREATE TABLE peers (
    peer_id TEXT COLLATE "C" PRIMARY KEY,
    seen_at DOUBLE PRECISION NOT NULL,
    body BYTEA NOT NULL
);

-- Images of calls, by the SHA-256 digest of their bytes, and the attempts that have them.
CREATE TABLE images (
    digest TEXT COLLATE "C" PRIMARY KEY,
    media_type TEXT COLLATE "C" NOT NULL,
    data BYTEA NOT NULL
);
CREATE TABLE attempt_images (
    digest TEXT COLLATE "C" NOT NULL,
    attempt BIGINT NOT NULL,
    PRIMARY KEY (digest, attempt)
);
CREATE INDEX attempt_images_by_attempt ON attempt_images (attempt);
