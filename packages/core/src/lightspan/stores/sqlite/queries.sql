-- Queries in the dialect of SQLite. A list of ids is one JSON array.

-- name: last_change
SELECT coalesce(max(change), 0) FROM rollouts

-- name: ends
SELECT
    (SELECT coalesce(max(change), 0) FROM rollouts),
    (SELECT coalesce(max(position), 0) FROM rollouts),
    (SELECT min(lease_until) FROM attempts INDEXED BY attempts_by_lease WHERE status = 'running')

-- name: attempts_of_rollouts
WITH RECURSIVE chain (place, attempt_id) AS (
    SELECT requested.key, attempt_id
    FROM json_each(?) AS requested CROSS JOIN rollouts ON rollout_id = requested.value
    UNION ALL
    SELECT place, previous FROM chain CROSS JOIN attempts USING (attempt_id)
)
SELECT attempt_id, rollout_id, number, epoch, status, runner_id, call_token, lease_until, started_at, ended_at, reward, outcome, message, capture_errors
FROM chain CROSS JOIN attempts USING (attempt_id)
ORDER BY place, number

-- name: expired
SELECT attempt_id, rollout_id, number, epoch, status, runner_id, call_token, lease_until, started_at, ended_at, reward, outcome, message, capture_errors
FROM attempts INDEXED BY attempts_by_lease
WHERE status = 'running' AND lease_until <= ?
ORDER BY lease_until, position LIMIT ?

-- name: spans
SELECT attempt_id, body, late, call_outcomes.outcome
FROM json_each(?) AS requested
    CROSS JOIN attempts ON attempt_id = requested.value
    CROSS JOIN spans ON attempt = attempts.position
    LEFT JOIN call_outcomes USING (attempt, call_id)
ORDER BY requested.key, spans.position

-- name: token_records
SELECT attempt_id, head, prompt, response, logprobs, late, call_outcomes.outcome
FROM json_each(?) AS requested
    CROSS JOIN attempts ON attempt_id = requested.value
    CROSS JOIN token_records ON attempt = attempts.position
    LEFT JOIN call_outcomes USING (attempt, call_id)
ORDER BY requested.key, sequence_start, call_id, choice

-- name: search
SELECT DISTINCT attempt FROM spans
WHERE attempt >= :first AND attempt < :last
    AND (:rollouts IS NULL OR (attempt >> 20) IN (SELECT value FROM json_each(:rollouts)))
    AND (instr(body, :text) OR :json <> :text AND instr(body, :json))
ORDER BY attempt DESC
