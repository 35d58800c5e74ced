-- Named queries that all stores share; `queries.py` explains the placeholders.

-- name: put_resources
INSERT INTO resources (resources_id, body)
VALUES (?, ?)
ON CONFLICT DO NOTHING

-- name: get_resources
SELECT body FROM resources WHERE resources_id = ?

-- name: last_version
SELECT coalesce(max(version), 0) FROM policies WHERE policy = ?

-- name: allotted_version
SELECT version FROM policies WHERE policy = ? AND request_id = ?

-- name: insert_version
INSERT INTO policies (policy, version, run_id, step, request_id)
VALUES (?, ?, ?, ?, ?)

-- name: policy_versions
SELECT policy, version, run_id, step FROM policies WHERE policy = ? ORDER BY version

-- name: put_peer
INSERT INTO peers (peer_id, seen_at, body)
VALUES (?, ?, ?)
ON CONFLICT (peer_id) DO UPDATE SET seen_at = excluded.seen_at, body = excluded.body

-- name: drop_peer
DELETE FROM peers WHERE peer_id = ?

-- name: forget_peers
DELETE FROM peers WHERE seen_at < ?

-- name: peers
SELECT seen_at, body FROM peers WHERE seen_at >= ? ORDER BY peer_id

-- name: bodies
SELECT rollout_id, body
FROM rollouts JOIN rollout_bodies USING (position)
WHERE rollout_id IN (?...)

-- name: insert_rollouts
INSERT INTO rollouts (position, rollout_id, run_id, queued, mode, step, max_infrastructure_tries, status, created_at, change, infrastructure_tries, attempts)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: insert_bodies
INSERT INTO rollout_bodies (position, body)
VALUES (?, ?)

-- name: progress
SELECT rollout_id, max_infrastructure_tries, status, created_at, change, infrastructure_tries, attempts, attempt_id, finished_at, queued
FROM rollouts
WHERE rollout_id IN (?...)

-- name: update_rollouts
UPDATE rollouts
SET status = ?, change = ?, infrastructure_tries = ?, attempts = ?, attempt_id = ?, finished_at = ?
WHERE rollout_id = ?

-- name: update_queue
UPDATE rollouts
SET queued = ?, status = ?, change = ?, infrastructure_tries = ?, attempts = ?, attempt_id = ?, finished_at = ?
WHERE rollout_id = ?

-- name: ends_of_runs
SELECT (SELECT min(run_id) FROM rollouts), (SELECT max(run_id) FROM rollouts)

-- name: queued
SELECT rollout_id, max_infrastructure_tries, status, created_at, change, infrastructure_tries, attempts, attempt_id, finished_at, queued, body
FROM rollouts JOIN rollout_bodies USING (position)
WHERE position IN (
    WITH RECURSIVE runs (run_id) AS (
        SELECT min(run_id) FROM rollouts
        UNION ALL
        SELECT (SELECT min(run_id) FROM rollouts WHERE rollouts.run_id > runs.run_id)
        FROM runs WHERE runs.run_id IS NOT NULL
    )
    SELECT first.position
    FROM runs JOIN rollouts AS first ON first.position IN (
        SELECT position FROM rollouts
        WHERE rollouts.run_id = runs.run_id AND queued = :queued
        ORDER BY position LIMIT :limit
    )
)
ORDER BY position LIMIT :limit

-- name: queued_of_run
SELECT rollout_id, max_infrastructure_tries, status, created_at, change, infrastructure_tries, attempts, attempt_id, finished_at, queued, body
FROM rollouts JOIN rollout_bodies USING (position)
WHERE run_id = :run_id AND queued = :queued
ORDER BY position LIMIT :limit

-- name: queued_runs
WITH RECURSIVE runs (run_id) AS (
    SELECT min(run_id) FROM rollouts
    UNION ALL
    SELECT (SELECT min(run_id) FROM rollouts WHERE rollouts.run_id > runs.run_id)
    FROM runs WHERE runs.run_id IS NOT NULL
)
SELECT run_id FROM runs
WHERE EXISTS (SELECT 1 FROM rollouts WHERE rollouts.run_id = runs.run_id AND queued > 0)

-- name: positions
SELECT position FROM rollouts

-- name: states
SELECT body, status, infrastructure_tries, attempt_id, created_at, finished_at, change
FROM rollouts JOIN rollout_bodies USING (position)

-- name: summaries
SELECT body, rollouts.rollout_id, run_id, mode, step, rollouts.status, created_at, rollouts.position, change, attempts.attempt_id, runner_id, attempts.outcome, message, reward, (
        SELECT outcome FROM call_outcomes
        WHERE attempt = attempts.position AND call_id IN ('(feedback)', '(feedback, of a call)')
        ORDER BY call_id LIMIT 1
    ), started_at, ended_at, capture_errors
FROM rollouts
    JOIN rollout_bodies ON rollout_bodies.position = rollouts.position
    LEFT JOIN attempts ON attempts.attempt_id = rollouts.attempt_id

-- name: attempts_at
WITH RECURSIVE chain (attempt_id) AS (
    SELECT attempt_id FROM rollouts WHERE position IN (?...)
    UNION ALL
    SELECT previous FROM chain JOIN attempts USING (attempt_id)
)
SELECT position, attempt_id FROM chain JOIN attempts USING (attempt_id)

-- name: prunable
SELECT position, rollout_id FROM rollouts
WHERE finished_at < ?
    AND change < (SELECT max(change) FROM rollouts)
    AND position < (SELECT max(position) FROM rollouts)
ORDER BY position LIMIT ?

-- name: prune_attempts
DELETE FROM attempts WHERE attempt_id IN (?...)

-- name: prune_spans
DELETE FROM spans WHERE attempt IN (?...)

-- name: prune_records
DELETE FROM token_records WHERE attempt IN (?...)

-- name: prune_outcomes
DELETE FROM call_outcomes WHERE attempt IN (?...)

-- name: images_of_attempts
SELECT digest FROM images
WHERE digest IN (SELECT digest FROM attempt_images WHERE attempt IN (?...))

-- name: prune_attempt_images
DELETE FROM attempt_images WHERE attempt IN (?...)

-- name: prune_images
DELETE FROM images
WHERE digest IN (?...)
    AND NOT EXISTS (SELECT 1 FROM attempt_images WHERE attempt_images.digest = images.digest)

-- name: prune_bodies
DELETE FROM rollout_bodies WHERE position IN (?...)

-- name: prune_rollouts
DELETE FROM rollouts WHERE position IN (?...)

-- name: known_rollouts
SELECT rollout_id FROM rollouts WHERE rollout_id IN (?...)

-- name: count
SELECT status, count(*) FROM rollouts GROUP BY status

-- name: count_of_run
SELECT status, count(*) FROM rollouts WHERE run_id = ? GROUP BY status

-- name: attempts_by_id
SELECT attempt_id, rollout_id, number, epoch, status, runner_id, call_token, lease_until, started_at, ended_at, reward, outcome, message, capture_errors
FROM attempts
WHERE attempt_id IN (?...)

-- name: insert_attempts
INSERT INTO attempts (attempt_id, rollout_id, number, epoch, runner_id, call_token, started_at, status, lease_until, ended_at, reward, outcome, message, capture_errors, position, previous)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT position << 20 FROM rollouts WHERE rollout_id = ?) + ?, (SELECT attempt_id FROM rollouts WHERE rollout_id = ?))

-- name: update_attempts
UPDATE attempts
SET status = ?, lease_until = ?, ended_at = ?, reward = ?, outcome = ?, message = ?, capture_errors = ?
WHERE attempt_id = ?

-- name: writers
SELECT attempt_id, position, epoch, status FROM attempts
WHERE attempt_id IN (?...)

-- name: insert_spans
INSERT INTO spans (attempt, span_id, call_id, late, body)
VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING

-- name: insert_records
INSERT INTO token_records (attempt, call_id, choice, sequence_start, late, head, prompt, response, logprobs)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING

-- name: insert_images
INSERT INTO images (digest, media_type, data)
VALUES (?, ?, ?)
ON CONFLICT DO NOTHING

-- name: insert_attempt_images
INSERT INTO attempt_images (digest, attempt)
VALUES (?, ?)
ON CONFLICT DO NOTHING

-- name: images
SELECT digest, media_type, data FROM images WHERE digest IN (?...)

-- name: span_is_late
SELECT late FROM spans WHERE attempt = ? AND span_id = ?

-- name: span_of
SELECT late, body FROM spans WHERE attempt = ? AND span_id = ?

-- name: replace_span
UPDATE spans SET late = ?, body = ? WHERE attempt = ? AND span_id = ?

-- name: drop_records
DELETE FROM token_records WHERE attempt = ? AND call_id = ?

-- name: has_records
SELECT 1 FROM token_records WHERE attempt = ? AND call_id = ? LIMIT 1

-- name: drop_outcome
DELETE FROM call_outcomes WHERE attempt = ? AND call_id = ?

-- name: has_call
SELECT EXISTS (SELECT 1 FROM token_records WHERE attempt = :attempt AND call_id = :call_id)
    OR EXISTS (SELECT 1 FROM spans WHERE attempt = :attempt AND call_id = :call_id)

-- name: put_outcome
INSERT INTO call_outcomes (attempt, call_id, outcome)
VALUES (?, ?, ?)
ON CONFLICT (attempt, call_id) DO UPDATE SET outcome = excluded.outcome
