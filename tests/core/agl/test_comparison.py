"""The names of Agent Lightning 0.3.0: each works as there, or says what to use.

What 0.3.0 says stands in a file; `nox -s tests_agl` looks whether it still does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import agl_comparison
import pytest

import lightspan.agl as agl
from lightspan.agl._instead import INSTEAD

ORIGINAL: dict[str, Any] = json.loads(
    (Path(__file__).parent / "agentlightning-0.3.0.json").read_text()
)
NAMES: list[str] = ORIGINAL["names"]
ELSEWHERE = {"APO", "AgentOpsTracer", "VERL"}
"""Shown by tests of their own: there they draw without a seed, or need an account or a cluster."""


@pytest.mark.parametrize("program", agl_comparison.PROGRAMS)
def test_a_program_says_what_it_says_with_the_original(program: str) -> None:
    said = agl_comparison.as_json(agl_comparison.PROGRAMS[program](agl))
    assert said == ORIGINAL["programs"][program]


def test_every_public_name_works_or_says_what_to_use() -> None:
    assert len(NAMES) == 116
    works = set(NAMES) & set(agl.__all__)
    assert works | (set(NAMES) & set(INSTEAD)) == set(NAMES)
    assert set(agl.__all__) & set(INSTEAD) == set()
    assert len(works) >= 98


def test_every_name_that_works_is_shown_at_work() -> None:
    shown = set().union(*agl_comparison.SHOWN.values()) | ELSEWHERE
    assert shown == set(NAMES) & set(agl.__all__)


@pytest.mark.parametrize("name", sorted(set(NAMES) & set(INSTEAD)))
def test_a_name_that_is_not_there_says_what_to_use(name: str) -> None:
    said = f"lightspan.agl has no {name!r}: {INSTEAD[name]}"
    with pytest.raises(ImportError) as imported:
        exec(f"from lightspan.agl import {name}")
    assert str(imported.value) == said
    with pytest.raises(AttributeError) as asked:
        getattr(agl, name)
    assert str(asked.value).endswith(INSTEAD[name])


def test_the_page_has_a_row_for_every_name() -> None:
    page = (Path(__file__).parents[3] / "docs" / "from-agent-lightning.md").read_text()
    rows = [f"| `{name}` | {INSTEAD.get(name, 'works')} |" for name in NAMES]
    table = page[page.index("| name | here |\n") :].splitlines()[2:]
    assert table[: len(rows)] == rows


async def test_the_default_tracer_records_without_an_account() -> None:
    tracer = agl.AgentOpsTracer(agentops_managed=True, instrument_managed=True)
    with tracer.lifespan():
        async with tracer.trace_context("work"):
            agl.emit_reward(0.5)
    assert agl.find_final_reward(tracer.get_last_trace()) == 0.5
