"""What the tests of the examples share.

An example's tests are collected where it is installed: some have an environment of their own.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [
    f"test_{name}_*.py"
    for name in ("desk", "math", "quest", "rag", "router")
    if find_spec(f"{name}_example") is None
]


@pytest.fixture(scope="session")
def sql_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the SQL example, with few questions; to be read only."""
    from lightspan_examples.data import generated
    from sql_example import worlds

    sizes: dict[worlds.Split, int] = {"train": 4, "dev": 1, "test": 1}
    cache = tmp_path_factory.mktemp("sql")
    few = partial(worlds.generate, worlds=sizes, questions_per_world=4)
    generated(cache, few, "few questions", None)
    return cache
