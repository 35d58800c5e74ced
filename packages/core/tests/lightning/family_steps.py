"""Build families of rollouts, as the gateway records them, and batches of families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightspan.lightning import Batch, BatchConfig, Selection, classify_calls, prepare_batch
from lightspan.lightning.credit import Family
from lightspan.lightning.episode import Episode, build_episode
from lightspan.lightning.forks import fork_points
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import dump
from lightspan.schema.routing import Routing
from lightspan_testing.strategies import make_attempt, make_call_span, make_record, make_rollout

ALL = Selection.of("*").routing


class Sampled(NamedTuple):
    """A model call of a rollout."""

    call_id: str
    response: Sequence[int] = (7,)
    prompt: Sequence[int] = (1, 2)
    observation: str = ""
    agent: str = "writer"


def rollout(
    name: str,
    reward: float | None,
    calls: Sequence[Sampled],
    *,
    forks: tuple[Episode, str] | None = None,
    group: str = "g",
    spans: Sequence[Any] = (),
    **fields: Any,
) -> Episode:
    """Return the episode of a rollout whose calls follow one another.

    Args:
        name: suffix of the ids.
        reward: reward of the rollout.
        calls: the calls that are sampled.
        forks: the episode that it repeats, and the id of the call at which it forks; None for a
            trunk.
        group: group id.
        spans: further spans.
        fields: further fields of the attempt.
    """
    replayed: list[Any] = []
    fork = None
    if forks is not None:
        [point] = [p for p in fork_points(forks[0]) if p.call and p.call.call_id == forks[1]]
        assert not point.refusal
        fork = point.fork
        trunk_calls = {call.call_id: call for call in forks[0].calls}
        for number, call_id in enumerate(point.prefix):
            outcome = {c.CALL_OUTCOME: "replayed"}
            at = 2 * number + 1, 2 * number + 2
            path = trunk_calls[call_id].agent_path
            replayed.append(make_call_span(call_id, path, at, outcome, attempt=name))
    records, made = [], []
    for number, call in enumerate(calls, start=len(replayed)):
        at = 2 * number + 1, 2 * number + 2
        first = {c.REPLAY_FORK: True} if fork and number == len(replayed) else {}
        prompt = {c.INPUT_MESSAGES: dump([{"role": "user", "content": call.observation}])}
        records.append(
            make_record(
                *(call.call_id, call.prompt, call.response, at, name),
                agent_path=call.agent,
                policy=call.agent if call.agent in ("plan", "work") else "policy",
            )
        )
        made.append(make_call_span(call.call_id, call.agent, at, {**prompt, **first}, attempt=name))
    return build_episode(
        make_attempt(name, reward, **fields),
        make_rollout(name, group, fork=fork),
        [*replayed, *made, *spans],
        records,
    )


def batch_of(episodes: Sequence[Episode], *, routing: Routing = ALL, **settings: Any) -> Batch:
    """Return the batch of a step; by default with the credit rule `family`."""
    config = BatchConfig(**{"credit": Family(), "estimator": "rloo", **settings})
    return prepare_batch(episodes, [classify_calls(e, routing) for e in episodes], config).finish()
