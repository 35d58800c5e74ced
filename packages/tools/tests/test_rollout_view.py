"""Tests of the coverage of calls that are trained only if engine and learner support them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from lightspan.lightning.episode import build_episode
from lightspan.lightning.selection import Rejection, Selection, classify_calls
from lightspan.schema.token_records import Sampling
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from lightspan_tools.rollout_view import _trained_coverage


def test_what_an_update_learned_from_was_trained_also_under_a_grammar() -> None:
    """The run does not record the capabilities; its explanations and counters show them."""
    records = [
        make_record("plain"),
        make_record("left", sequence=(3, 4)),
        make_record("grammar", grammar="start: X", sequence=(5, 6)),
        make_record("mismatch", grammar="start: X", sequence=(7, 8)),
        make_record("truncated", sampling=Sampling(top_p=0.9), sequence=(9, 10)),
    ]
    episode = build_episode(make_attempt(), make_rollout(), [], records)
    judge = partial(classify_calls, episode, Selection.of().routing)

    bound, truncated, unused = (
        Rejection.CONSTRAINED,
        Rejection.TRUNCATED_SAMPLING,
        Rejection.UNUSED,
    )
    both = (bound, truncated)

    def rejections(
        *explained: str,
        supported: Sequence[Rejection] = (),
        is_explained: bool = True,
        weight: float = 1.0,
    ) -> list[Rejection | None]:
        why = SimpleNamespace(token_weight=weight)
        explanations: Any = {f"at-1/{call_id}/0": why for call_id in explained}
        coverage = _trained_coverage(
            judge, explanations, {}, supported=supported, is_explained=is_explained
        )
        return [entry.rejection for entry in coverage.entries]

    assert rejections(is_explained=False) == [None, None, bound, bound, truncated]
    assert rejections("plain") == [None, unused, bound, bound, truncated]
    assert rejections("plain", supported=both) == [None, unused, unused, unused, unused]
    learned = rejections("plain", "grammar", "truncated")
    assert learned == [None, unused, None, bound, None]
    # an update that `target_kl` skipped
    assert rejections("plain", weight=0.0)[:2] == [Rejection.TARGET_KL, unused]
    # a step that says that it learned from nothing, as one that searched for prompts
    assert rejections() == [unused, unused, bound, bound, truncated]
    assert rejections(supported=both) == [unused] * 5
