"""Test the keys that identify the state in which a call was made."""

from __future__ import annotations

from typing import Any

import pytest

from lightspan.errors import ConfigError
from lightspan.lightning import BatchConfig, Selection, classify_calls, prepare_batch
from lightspan.lightning.credit import anchor
from lightspan.lightning.episode import Call, build_episode
from lightspan.lightning.states import State, key_name, key_of, observation, state_of
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.token_records import CallOutcome
from lightspan_testing.strategies import make_attempt, make_call_span, make_record, make_rollout

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Find the key."},
    {"role": "user", "content": "You are in the cellar.\nA door leads up."},
]


def call_with(*said: dict[str, Any], prompt: str | None = None) -> Call:
    text = genai_messages.dump(said) if prompt is None else prompt
    span = make_call_span("c0", attributes={c.INPUT_MESSAGES: text})
    return Call("c0", 0, "finder", CallOutcome.OK, 1, 2, span=span)


def test_the_observation_is_the_last_message() -> None:
    state = state_of(call_with(*CHAT), "t7", 3)
    assert (state.task_id, state.agent_path, state.turn) == ("t7", "finder", 3)
    assert [message["role"] for message in state.messages] == ["system", "user"]
    assert observation(state) == "You are in the cellar.\nA door leads up."


def fails(state: State) -> str:
    return {}[state.turn]


def unhashable(state: State) -> Any:
    return [state.observation]


async def later(state: State) -> str:
    return state.observation


def test_a_key_that_fails_is_named() -> None:
    state = State(task_id="t7", agent_path="finder", turn=3, messages=CHAT)
    with pytest.raises(ConfigError, match=r"key=.*:fails on task t7, turn 3: KeyError: 3; return"):
        key_of(fails, state)
    with pytest.raises(ConfigError, match="TypeError: unhashable type: 'list'; return a text"):
        key_of(unhashable, state)
    with pytest.raises(ConfigError, match="is async: use a plain function"):
        anchor(later)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="key='observation': use a function of a state"):
        anchor("observation")  # type: ignore[arg-type]
    assert anchor(prior=0.0).name == "anchor(1, key=observation, prior=0)"
    assert anchor(fails, gamma=0.5).name == f"anchor(0.5, key={__name__}:fails)"
    assert key_name(observation) == "observation"


def test_calls_in_one_state_are_compared_whatever_their_turn() -> None:
    """Check that calls in the same state are compared, if they reach it in different turns."""

    def rollout(name: str, reward: float, *rooms: str) -> Any:
        records = [
            make_record(f"{name}{n}", [n + 1], [9], (2 * n + 1, 2 * n + 2), name)
            for n in range(len(rooms))
        ]
        spans = [
            make_call_span(
                f"{name}{n}",
                attributes={
                    c.INPUT_MESSAGES: genai_messages.dump([{"role": "user", "content": room}])
                },
                attempt=name,
            )
            for n, room in enumerate(rooms)
        ]
        return build_episode(make_attempt(name, reward), make_rollout(name, "g"), spans, records)

    episodes = [rollout("1", 1.0, "hall"), rollout("2", 0.0, "cellar", "hall")]
    routing = Selection.of("*").routing
    config = BatchConfig(estimator="rloo", credit=anchor(prior=0.0))
    coverages = [classify_calls(episode, routing, step_rewards=True) for episode in episodes]
    whys = prepare_batch(episodes, coverages, config).finish().explanations
    told = {key[1]: (why.against, why.others, why.baseline) for key, why in whys.items()}
    assert told == {
        "10": ("in its state", 1, 0.0),
        "20": ("in its state", 0, 1.0),  # nobody else was in the cellar: what its turn says
        "21": ("in its state", 1, 1.0),
    }
