-- What PostgreSQL is asked in its own words. Lists of ids come as arrays.

-- name: now
SELECT extract(epoch FROM clock_timestamp())::float8

-- name: last_change
SELECT change FROM ends

-- name: attempts_of_rollouts
WITH RECURSIVE made (place, attempt_id) AS (
    SELECT asked.place, attempt_id
    FROM unnest(%s::text[]) WITH ORDINALITY AS asked (id, place)
        JOIN rollouts ON rollout_id = asked.id
    UNION ALL
    SELECT place, previous FROM made JOIN attempts USING (attempt_id)
)
SELECT attempt_id, rollout_id, number, epoch, status, runner_id, call_token, lease_until, started_at, ended_at, reward, outcome, message, damage
FROM made JOIN attempts USING (attempt_id)
ORDER BY place, number

-- name: expired
SELECT attempt_id, rollout_id, number, epoch, status, runner_id, call_token, lease_until, started_at, ended_at, reward, outcome, message, damage
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
FROM unnest(%s::text[]) WITH ORDINALITY AS asked (id, place)
    JOIN attempts ON attempt_id = asked.id
    JOIN spans ON spans.attempt = attempts.position
    LEFT JOIN call_outcomes USING (attempt, call_id)
ORDER BY asked.place, spans.position

-- name: token_records
SELECT attempt_id, head, prompt, response, logprobs, late, call_outcomes.outcome
FROM unnest(%s::text[]) WITH ORDINALITY AS asked (id, place)
    JOIN attempts ON attempt_id = asked.id
    JOIN token_records ON token_records.attempt = attempts.position
    LEFT JOIN call_outcomes USING (attempt, call_id)
ORDER BY asked.place, sequence_start, call_id, choice
