"""Test the reward of a scorer in place of the app's."""

from __future__ import annotations

import math

import msgspec
import pytest

from lightspan.lightning.episode import build_episode, dimension_means
from lightspan.schema.reward import parse_reward
from lightspan.training.rewards import Scored, with_reward
from lightspan_testing.strategies import make_attempt, make_rollout

SCORED = Scored(value=1.0, dimensions={"reward": 1.0, "length": 5.0})


@pytest.mark.parametrize(
    ("own", "scored", "expected"),
    [
        (0.25, SCORED, {"reward": 1.0, "length": 5.0, "app": 0.25}),
        (
            {"reward": 0.25, "latency": 2.5, "length": 9.0},
            SCORED,
            {"reward": 1.0, "latency": 2.5, "length": 5.0, "app": 0.25},
        ),
        ({"reward": 0.25, "latency": 2.5}, Scored(value=0.5), {"latency": 2.5, "app": 0.25}),
        ({"reward": math.nan, "latency": 2.5}, Scored(value=0.5), {"latency": 2.5}),
    ],
)
def test_the_named_numbers_of_the_app_are_kept(
    own: object, scored: Scored, expected: dict[str, float]
) -> None:
    attempt = msgspec.structs.replace(make_attempt("0"), reward=parse_reward(own))
    episode = with_reward(build_episode(attempt, make_rollout("0"), [], []), scored)
    assert (episode.reward, episode.dimensions) == (scored.value, expected)
    assert dimension_means([episode]) == {
        f"dimension/{name}": value for name, value in expected.items() if name != "reward"
    }
