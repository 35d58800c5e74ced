"""The rate that is chosen where none is given: within a factor of three on every example."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

from lightspan.algorithms.learning_rate import default_rate

SMALL = 760_000
"""Parameters of the examples' small model; one of 750,000 has the same rate."""


@pytest.mark.parametrize(
    "name",
    [
        "quest_example.training",
        "sql_example.training",
        "math_example.training",
        "rag_example.training",
        "router_example.recipes",
    ],
)
def test_the_chosen_rate_is_near_that_of_the_recipe(name: str) -> None:
    """Recipes were measured with their rates; one without has the chosen one, as those of a model
    that somebody names have, whatever its size."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip("the example is in an environment of its own")
    module = import_module(name)
    chosen = default_rate(SMALL, lora=False)
    assert default_rate(750_000, lora=False) == chosen == 4e-4
    rate = module.RECIPE.learning_rate
    assert rate is None or chosen / 3 <= rate <= chosen * 3
    assert module.REAL_MODEL.learning_rate is None
