-- Named queries of the SQLite store. Lists of ids come as one JSON array.

-- name: put_resources
INSERT OR IGNORE INTO resources (resources_id, body) VALUES (?, ?)

-- name: get_resources
SELECT body FROM resources WHERE resources_id = ?

-- name: last_version
SELECT coalesce(max(version), 0) FROM policies WHERE policy = ?

-- name: insert_version
INSERT INTO policies (policy, version, run_id, step) VALUES (?, ?, ?, ?)

-- name: policy_versions
SELECT policy, version, run_id, step FROM policies WHERE policy = ? ORDER BY version

-- name: put_peer
INSERT OR REPLACE INTO peers (peer_id, seen_at, body) VALUES (?, ?, ?)

-- name: drop_peer
DELETE FROM peers WHERE peer_id = ?

-- name: forget_peers
DELETE FROM peers WHERE seen_at < ?

-- name: peers
SELECT seen_at, body FROM peers WHERE seen_at >= ? ORDER BY peer_id

-- name: last_change
SELECT coalesce(max(change), 0) FROM rollouts

-- name: ends
SELECT
    (SELECT coalesce(max(change), 0) FROM rollouts),
    (SELECT coalesce(max(position), 0) FROM rollouts),
    (SELECT min(lease_until) FROM attempts INDEXED BY attempts_by_lease WHERE status = 'running')

-- name: bodies
SELECT rollout_id, body
FROM rollouts JOIN rollout_bodies USING (position)
WHERE rollout_id IN (SELECT value FROM json_each(?))

-- name: insert_rollouts
INSERT INTO rollouts (position, rollout_id, run_id, queued, mode, step, max_infrastructure_tries, status, created_at, change, infrastructure_tries, attempts)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: insert_bodies
INSERT INTO rollout_bodies (position, body) VALUES (?, ?)

-- name: progress
SELECT rollout_id, max_infrastructure_tries, status, created_at, change, infrastructure_tries, attempts, attempt_id, finished_at, queued
FROM rollouts
WHERE rollout_id IN (SELECT value FROM json_each(?))

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

-- name: states
SELECT body, status, infrastructure_tries, attempt_id, created_at, finished_at, change
FROM rollouts JOIN rollout_bodies USING (position)

-- name: known_rollouts
SELECT rollout_id FROM rollouts WHERE rollout_id IN (SELECT value FROM json_each(?))

-- name: count
SELECT status, count(*) FROM rollouts GROUP BY status

-- name: count_of_run
SELECT status, count(*) FROM rollouts WHERE run_id = ? GROUP BY status

-- name: attempts_by_id
SELECT attempt_id, rollout_id, number, epoch, status, runner_id, call_token, lease_until, started_at, ended_at, reward, outcome, message, damage
FROM attempts
WHERE attempt_id IN (SELECT value FROM json_each(?))

-- name: attempts_of_rollouts
WITH RECURSIVE made (place, attempt_id) AS (
    SELECT asked.key, attempt_id
    FROM json_each(?) AS asked CROSS JOIN rollouts ON rollout_id = asked.value
    UNION ALL
    SELECT place, previous FROM made CROSS JOIN attempts USING (attempt_id)
)
SELECT attempt_id, rollout_id, number, epoch, status, runner_id, call_token, lease_until, started_at, ended_at, reward, outcome, message, damage
FROM made CROSS JOIN attempts USING (attempt_id)
ORDER BY place, number

-- name: expired
SELECT attempt_id, rollout_id, number, epoch, status, runner_id, call_token, lease_until, started_at, ended_at, reward, outcome, message, damage
FROM attempts INDEXED BY attempts_by_lease
WHERE status = 'running' AND lease_until <= ?
ORDER BY lease_until, position LIMIT ?

-- name: insert_attempts
INSERT INTO attempts (attempt_id, rollout_id, number, epoch, runner_id, call_token, started_at, status, lease_until, ended_at, reward, outcome, message, damage, position, previous)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT position << 20 FROM rollouts WHERE rollout_id = ?) + ?, (SELECT attempt_id FROM rollouts WHERE rollout_id = ?))

-- name: update_attempts
UPDATE attempts
SET status = ?, lease_until = ?, ended_at = ?, reward = ?, outcome = ?, message = ?, damage = ?
WHERE attempt_id = ?

-- name: writers
SELECT attempt_id, position, epoch, status FROM attempts
WHERE attempt_id IN (SELECT value FROM json_each(?))

-- name: insert_spans
INSERT OR IGNORE INTO spans (attempt, span_id, call_id, late, body)
VALUES (?, ?, ?, ?, ?)

-- name: insert_records
INSERT OR IGNORE INTO token_records (attempt, call_id, choice, sequence_start, late, head, prompt, response, logprobs)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)

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
INSERT OR REPLACE INTO call_outcomes (attempt, call_id, outcome) VALUES (?, ?, ?)

-- name: spans
SELECT attempt_id, body, late, call_outcomes.outcome
FROM json_each(?) AS asked
    CROSS JOIN attempts ON attempt_id = asked.value
    CROSS JOIN spans ON attempt = attempts.position
    LEFT JOIN call_outcomes USING (attempt, call_id)
ORDER BY asked.key, spans.position

-- name: token_records
SELECT attempt_id, head, prompt, response, logprobs, late, call_outcomes.outcome
FROM json_each(?) AS asked
    CROSS JOIN attempts ON attempt_id = asked.value
    CROSS JOIN token_records ON attempt = attempts.position
    LEFT JOIN call_outcomes USING (attempt, call_id)
ORDER BY asked.key, sequence_start, call_id, choice
