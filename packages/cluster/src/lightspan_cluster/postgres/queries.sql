-- Queries in PostgreSQL's dialect. Lists of ids are arrays, and so is each column of inserted rows, so
-- one statement inserts any number of rows. `insert_images` locks an image that is stored already, and
-- `images_of_attempts` each image that may be deleted: else an image could be deleted whose next attempt is
-- not committed yet.

-- name: now
SELECT extract(epoch FROM clock_timestamp())::float8

-- name: last_change
SELECT change FROM ends

-- name: attempts_of_rollouts
WITH RECURSIVE made (place, attempt_id) AS (
    SELECT wanted.place, attempt_id
    FROM unnest(%s::text[]) WITH ORDINALITY AS wanted (id, place)
        JOIN rollouts ON rollout_id = wanted.id
    UNION ALL
    SELECT place, previous FROM made JOIN attempts USING (attempt_id)
)
SELECT attempt_id, rollout_id, number, epoch, status, runner_id, call_token, lease_until, started_at, ended_at, reward, outcome, message, capture_errors
FROM made JOIN attempts USING (attempt_id)
ORDER BY place, number

-- name: expired
SELECT attempt_id, rollout_id, number, epoch, status, runner_id, call_token, lease_until, started_at, ended_at, reward, outcome, message, capture_errors
FROM attempts
WHERE status = 'running' AND lease_until <= %s
ORDER BY lease_until, position LIMIT %s

-- name: writers_now
SELECT attempt_id, position, epoch, status FROM attempts
WHERE attempt_id = ANY(%s)
FOR SHARE NOWAIT

-- name: span_of
SELECT late, body FROM spans WHERE attempt = %s AND span_id = %s FOR UPDATE

-- name: spans
SELECT attempt_id, body, late, call_outcomes.outcome
FROM unnest(%s::text[]) WITH ORDINALITY AS wanted (id, place)
    JOIN attempts ON attempt_id = wanted.id
    JOIN spans ON spans.attempt = attempts.position
    LEFT JOIN call_outcomes USING (attempt, call_id)
ORDER BY wanted.place, spans.position

-- name: token_records
SELECT attempt_id, head, prompt, response, logprobs, late, call_outcomes.outcome
FROM unnest(%s::text[]) WITH ORDINALITY AS wanted (id, place)
    JOIN attempts ON attempt_id = wanted.id
    JOIN token_records ON token_records.attempt = attempts.position
    LEFT JOIN call_outcomes USING (attempt, call_id)
ORDER BY wanted.place, sequence_start, call_id, choice

-- name: search
SELECT DISTINCT attempt FROM spans
WHERE attempt >= %(first)s AND attempt < %(last)s 
    AND (%(rollouts)s::bigint[] IS NULL OR attempt >> 20 = ANY(%(rollouts)s))
    AND (position(%(text)s::bytea IN body) > 0
        OR %(json)s::bytea <> %(text)s::bytea AND position(%(json)s::bytea IN body) > 0)
ORDER BY attempt DESC

-- name: put_resources
INSERT INTO resources (resources_id, body)
SELECT * FROM unnest(%b::text[], %b::bytea[])
ON CONFLICT DO NOTHING

-- name: insert_version
INSERT INTO policies (policy, version, run_id, step, request_id)
SELECT * FROM unnest(%b::text[], %b::bigint[], %b::text[], %b::bigint[], %b::text[])

-- name: insert_rollouts
INSERT INTO rollouts (position, rollout_id, run_id, queued, mode, step, max_infrastructure_tries, status, created_at, change, infrastructure_tries, attempts)
SELECT * FROM unnest(%b::bigint[], %b::text[], %b::text[], %b::smallint[], %b::text[], %b::bigint[], %b::bigint[], %b::text[], %b::float8[], %b::bigint[], %b::bigint[], %b::bigint[])

-- name: insert_bodies
INSERT INTO rollout_bodies (position, body)
SELECT * FROM unnest(%b::bigint[], %b::bytea[])

-- name: insert_spans
INSERT INTO spans (attempt, span_id, call_id, late, body)
SELECT * FROM unnest(%b::bigint[], %b::text[], %b::text[], %b::boolean[], %b::bytea[])
ON CONFLICT DO NOTHING

-- name: insert_records
INSERT INTO token_records (attempt, call_id, choice, sequence_start, late, head, prompt, response, logprobs)
SELECT * FROM unnest(%b::bigint[], %b::text[], %b::bigint[], %b::bigint[], %b::boolean[], %b::bytea[], %b::bytea[], %b::bytea[], %b::bytea[])
ON CONFLICT DO NOTHING

-- name: insert_images
INSERT INTO images (digest, media_type, data)
SELECT * FROM unnest(%b::text[], %b::text[], %b::bytea[])
ON CONFLICT (digest) DO UPDATE SET digest = excluded.digest

-- name: insert_attempt_images
INSERT INTO attempt_images (digest, attempt)
SELECT * FROM unnest(%b::text[], %b::bigint[])
ON CONFLICT DO NOTHING

-- name: images_of_attempts
SELECT digest FROM images
WHERE digest IN (SELECT digest FROM attempt_images WHERE attempt = ANY(%s))
ORDER BY digest FOR UPDATE

-- name: insert_attempts
INSERT INTO attempts (attempt_id, rollout_id, number, epoch, runner_id, call_token, started_at, status, lease_until, ended_at, reward, outcome, message, capture_errors, position, previous)
SELECT made.attempt_id, made.rollout_id, made.number, made.epoch, made.runner_id, made.call_token, made.started_at, made.status, made.lease_until, made.ended_at, made.reward, made.outcome, made.message, made.capture_errors,
    (rollouts.position << 20) + made.number, rollouts.attempt_id
FROM unnest(%b::text[], %b::text[], %b::bigint[], %b::bigint[], %b::text[], %b::text[], %b::float8[], %b::text[], %b::float8[], %b::float8[], %b::bytea[], %b::text[], %b::bytea[], %b::bytea[], %b::text[], %b::bigint[], %b::text[])
    AS made (attempt_id, rollout_id, number, epoch, runner_id, call_token, started_at, status, lease_until, ended_at, reward, outcome, message, capture_errors, its_rollout, its_number, latest_of)
    JOIN rollouts ON rollouts.rollout_id = made.rollout_id

-- name: update_rollouts
UPDATE rollouts
SET status = made.status, change = made.change, infrastructure_tries = made.infrastructure_tries, attempts = made.attempts, attempt_id = made.attempt_id, finished_at = made.finished_at
FROM unnest(%b::text[], %b::bigint[], %b::bigint[], %b::bigint[], %b::text[], %b::float8[], %b::text[]) AS made (status, change, infrastructure_tries, attempts, attempt_id, finished_at, rollout_id)
WHERE rollouts.rollout_id = made.rollout_id

-- name: update_queue
UPDATE rollouts
SET queued = made.queued, status = made.status, change = made.change, infrastructure_tries = made.infrastructure_tries, attempts = made.attempts, attempt_id = made.attempt_id, finished_at = made.finished_at
FROM unnest(%b::smallint[], %b::text[], %b::bigint[], %b::bigint[], %b::bigint[], %b::text[], %b::float8[], %b::text[]) AS made (queued, status, change, infrastructure_tries, attempts, attempt_id, finished_at, rollout_id)
WHERE rollouts.rollout_id = made.rollout_id

-- name: update_attempts
UPDATE attempts
SET status = made.status, lease_until = made.lease_until, ended_at = made.ended_at, reward = made.reward, outcome = made.outcome, message = made.message, capture_errors = made.capture_errors
FROM unnest(%b::text[], %b::float8[], %b::float8[], %b::bytea[], %b::text[], %b::bytea[], %b::bytea[], %b::text[]) AS made (status, lease_until, ended_at, reward, outcome, message, capture_errors, attempt_id)
WHERE attempts.attempt_id = made.attempt_id
