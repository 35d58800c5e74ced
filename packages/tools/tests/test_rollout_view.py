"""Tests of the coverage of calls that are trained only if engine and learner support them."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightspan.lightning.episode import build_episode
from lightspan.lightning.selection import Rejection, Selection, classify_calls
from lightspan.schema.token_records import Sampling
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from lightspan_tools.rollout_view import _trained_coverage


def test_what_an_update_learned_from_was_trained_also_under_a_grammar() -> None:
    """The run does not record the capabilities; its explanations show which calls were trained."""
    records = [
        make_record("plain"),
        make_record("left", sequence=(3, 4)),
        make_record("grammar", grammar="start: X", sequence=(5, 6)),
        make_record("mismatch", grammar="start: X", sequence=(7, 8)),
        make_record("truncated", sampling=Sampling(top_p=0.9), sequence=(9, 10)),
    ]
    episode = build_episode(make_attempt(), make_rollout(), [], records)
    judge = partial(classify_calls, episode, Selection.of().routing)

    def rejections(*explained: str) -> list[Rejection | None]:
        explanations: Any = dict.fromkeys(f"at-1/{call_id}/0" for call_id in explained)
        coverage = _trained_coverage(judge, explanations, {}, is_explained=bool(explained))
        return [entry.rejection for entry in coverage.entries]

    bound, truncated = Rejection.CONSTRAINED, Rejection.TRUNCATED_SAMPLING
    assert rejections() == [None, None, bound, bound, truncated]
    assert rejections("plain") == [None, Rejection.UNUSED, bound, bound, truncated]
    learned = rejections("plain", "grammar", "truncated")
    assert learned == [None, Rejection.UNUSED, None, bound, None]
    # a step that says that it learned from nothing, as one that searched for prompts
    nothing = [
        entry.rejection for entry in _trained_coverage(judge, {}, {}, is_explained=True).entries
    ]
    assert nothing == [Rejection.UNUSED, Rejection.UNUSED, bound, bound, truncated]
