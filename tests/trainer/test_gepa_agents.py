"""Test GEPA for the instructions of agents in an app without lightspan, with real HTTP."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langgraph")

from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan_prompts.search.candidates import read_found
from lightspan_testing.scripted import Request, ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes

pytestmark = pytest.mark.slow

BEFORE = "You are the router of a help desk.\nToday is {date_1}.\n\nWhat is known of the customer"


class Run(NamedTuple):
    """A complete run; tests must not change it."""

    folder: Path
    result: Any
    model: list[Request]


@pytest.fixture(scope="module")
def run(desk: Any, environment: pytest.MonkeyPatch, tmp_path_factory: Any) -> Run:
    folder = tmp_path_factory.mktemp("desk") / "run"
    with ScriptedServer(desk.speaks) as model, ScriptedServer(desk.reflects) as thinker:
        environment.setenv("OPENAI_BASE_URL", model.url)
        result = desk.train(folder, thinker.url)
    return Run(folder, result, model.requests)


def by_agent(requests: list[Request]) -> tuple[list[Request], list[Request]]:
    """Return the router's requests, and the clerk's."""
    is_clerk = [r.messages[0]["content"].startswith("You are a clerk") for r in requests]
    return (
        [r for r, clerk in zip(requests, is_clerk, strict=True) if not clerk],
        [r for r, clerk in zip(requests, is_clerk, strict=True) if clerk],
    )


def test_the_router_learns(run: Run, desk: Any) -> None:
    assert [evaluation.mean for evaluation in run.result.evaluations] == [0.0, 1.0]
    [(name, prompt)] = run.result.prompts.items()
    assert (name, prompt.place, prompt.agent) == ("router", "agent", "router")
    assert prompt.before.text.startswith(BEFORE)
    assert prompt.before.text.endswith("\n\nSay which desk the mail is for.")
    assert prompt.diff().endswith(f"\n-Say which desk the mail is for.\n+{desk.RULES}")
    assert prompt.after.fields == prompt.before.fields


def test_no_rollout_is_done_only_to_find_the_text(run: Run) -> None:
    """Check that finding the instructions needs no additional rollout.

    LangChain's cache, which the app uses, must not answer a call of another candidate.
    """
    found = read_found(run.folder)
    assert found is not None
    train = stored_episodes(run.folder / "store.db", mode=Mode.TRAIN)
    assert found.rollouts == len(train) == 22  # 8 of the selection split, 3 and 3, 8 again
    assert len(by_agent(run.model)[0]) == 22 + 4 + 4
    assert (found.applied, found.kept, found.unasked) == (14, {}, {})


def test_other_requests_are_byte_for_byte_what_they_were(
    run: Run, desk: Any, environment: pytest.MonkeyPatch
) -> None:
    """Compare the clerk's requests with those of the same app without lightspan."""
    graph = importlib.import_module("desk_graph").graph
    plain: list[Request] = []
    for answer in ("which desk is it?", *desk.DESKS.values()):
        with ScriptedServer(
            lambda r, a=answer: "We are on it." if "clerk" in r.messages[0]["content"] else a
        ) as server:
            environment.setenv("OPENAI_BASE_URL", server.url)
            for task in [*desk.tasks(0, 16), *desk.tasks(30, 34)]:
                graph.invoke({"text": task["mail"], "records": task["records"]})
            plain += server.requests
        cache = importlib.import_module("langchain_core.globals").get_llm_cache()
        if cache is not None:  # another test may have taken it away
            cache.clear()
    routers, clerks = ({json.dumps(r.body) for r in part} for part in by_agent(plain))
    sent_routers, sent_clerks = by_agent(run.model)
    assert len(sent_clerks) > 20
    assert {json.dumps(request.body) for request in sent_clerks} <= clerks
    told = json.dumps("Say which desk the mail is for.")[1:-1]
    sent = [json.dumps(r.body) for r in sent_routers]
    assert sum(desk.RULES in text for text in sent) == 3 + 8 + 4
    assert {text.replace(desk.RULES, told) for text in sent} <= routers
    assert {r.headers["authorization"] for r in run.model} == {"Bearer own-key"}


def test_both_texts_are_in_the_record(run: Run, desk: Any) -> None:
    episodes = stored_episodes(run.folder / "store.db")
    applied: Counter[Any] = Counter()
    for call in (call for episode in episodes for call in episode.calls):
        assert call.span is not None
        attributes = call.span.attributes
        original = str(attributes.get(c.PROMPT_ORIGINAL, ""))
        assert (call.agent_path == "router") is original.endswith("the mail is for.")
        changed = desk.RULES in str(attributes[c.INPUT_MESSAGES])
        applied[call.agent_path, attributes.get(c.PROMPT_APPLIED), changed] += 1
    assert applied["router", True, True] == 3 + 8 + 4
    assert applied["router", None, False] == 4 + 8  # held out before, and the survey
    assert applied["router", True, False] == 3  # the first candidate is the app's own text
