"""Tests of discovering prompts in an app's calls: real clients, real HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from lightspan import agent, prompt
from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import AttemptContext, current_agent
from lightspan.capture.entry import open_scope
from lightspan.capture.other_clients import record_call
from lightspan.capture.prompt_overrides import record_prompt
from lightspan.errors import ConfigError, RewardError, UnknownAgentError
from lightspan.lightning.episode import Episode, build_episode
from lightspan.schema import semconv as c
from lightspan.schema.prompts import PromptPlace
from lightspan.schema.records import task_id
from lightspan.schema.resources import INSTRUCTIONS
from lightspan.schema.system_prompts import (
    ASKS,
    NEW_AGENT,
    NO_INSTRUCTIONS,
    OTHER_TEXT,
    Instructions,
)
from lightspan_prompts.search.candidates import Candidate
from lightspan_prompts.search.evaluator import Evaluator, Trial
from lightspan_prompts.search.feedback import evidence_of
from lightspan_prompts.search.prompt_discovery import Surveyed, survey
from lightspan_prompts.search.search_log import SearchLog
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.strategies import make_attempt, make_rollout

ROUTER = "You are the router of a desk. It is 2026-11-{day:02d}. Say which desk it is."
OTHER = "Now sum up in a few words what all of the others have said so far, please."
USER: Any = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        ScriptedServer("ok") as server,
        openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as made,
    ):
        yield made
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()


App = Callable[[int], None]


@pytest.fixture
def ask(client: openai.OpenAI) -> Callable[..., None]:
    """Return a function that calls the model as an agent, with given messages before the user's."""

    def asked(name: str, *messages: Any, **more: Any) -> None:
        told = [m if isinstance(m, dict) else {"role": "system", "content": m} for m in messages]
        with agent(name):
            client.chat.completions.create(model="m", messages=[*told, USER], **more)

    return asked


def episode_of(name: str, spans: Any) -> Episode:
    return build_episode(make_attempt(name, reward=None), make_rollout(name), spans, [])


def played(app: App, told: Instructions, count: int = 8) -> list[Episode]:
    """Return the episodes of some rollouts of the app."""
    episodes = []
    for number in range(count):
        scope = AttemptContext(
            rollout_id=f"ro-{number}", attempt_id=f"at-{number}", instructions=told
        )
        with open_scope(scope):
            app(number)
        assert scope.recorder.capture_errors() == []
        episodes.append(episode_of(str(number), scope.recorder.drain()))
    return episodes


def surveyed(app: App, *patterns: str) -> Surveyed:
    return survey(played(app, Instructions(surveyed=list(patterns))), patterns)


def test_agents_are_found_by_name_by_path_and_by_pattern(ask: Any) -> None:
    def app(n: int) -> None:
        with agent("team"):
            ask("router", ROUTER.format(day=n + 1))
        ask("clerk", "You are a clerk.")
        ask("clerk", "You are a clerk.")

    for patterns, expected in {
        ("router",): {"router": "team/router"},
        ("team/router",): {"team/router": "team/router"},
        ("**",): {"team/router": "team/router", "clerk": "clerk"},
        ("*", "clerk"): {"team/router": "team/router", "clerk": "clerk"},
    }.items():
        discovered = surveyed(app, *patterns)
        assert {name: each.agent for name, each in discovered.components.items()} == expected
        assert discovered.left_out == {}
    template = discovered.components["team/router"].template
    assert template == "You are the router of a desk. It is {date_1}. Say which desk it is."


def test_what_is_true_of_today_alone_is_a_placeholder(ask: Any) -> None:
    """A weekday and a month are no whole date, and differ on another day."""
    now = datetime.now(UTC)

    def app(n: int) -> None:
        ask("router", f"You route mails. It is {now:%A}, in {now:%B %Y}. Say which desk it is.")

    discovered = surveyed(app, "router")
    template = discovered.components["router"].template
    assert template == "You route mails. It is {date_1}. Say which desk it is."
    assert discovered.lines() == ["found the text of 'router': 54 characters, with {date_1} in it"]
    [episode] = played(app, discovered.instructions({"router": f"Anew: {template}"}), 1)
    assert evidence_of(episode, None, discovered.concerns).applied == 1


def test_what_looks_like_today_is_named(ask: Any) -> None:
    now = datetime.now(UTC)

    def app(n: int) -> None:
        prompt("mails", f"Be kind: it is {now:%A}. Founded on 3 March 1998.")
        ask("router", "You route mails. Current date: the last Friday before the feast.\nBe brief")

    assert [line for line in surveyed(app, "mails", "router").lines() if "looks like" in line] == [
        f"the text of 'mails' contains '{now:%A}', which looks like today: once it changes, the "
        "learned text is no longer sent: write a {placeholder} for it, and fill it in the text "
        "that lightspan.prompt returns",
        "the text of 'router' contains 'Current date: the last Friday before the feast', which "
        "looks like today: if it changes from day to day, the learned text is sent today only: "
        "request the text by name in the app, lightspan.prompt(name, text), with a {placeholder} "
        "for it",
    ]


def test_a_pattern_that_matches_nothing(ask: Any) -> None:
    def app(n: int) -> None:
        ask("router", ROUTER.format(day=n + 1))
        prompt("mails", "Be kind.")

    with pytest.raises(UnknownAgentError) as caught:
        surveyed(app, "ruter", "router")
    assert str(caught.value) == (
        "no agent matches 'ruter'. Did you mean 'router'? Agents: 'router', 'mails'"
    )


def test_why_nothing_was_seen() -> None:
    episodes = played(lambda n: None, Instructions(surveyed=["router"]), 2)
    failed = [replace(episode, message="the app raised KeyError: 'desk'") for episode in episodes]
    with pytest.raises(UnknownAgentError) as caught:
        survey(failed, ["router"])
    assert str(caught.value) == (
        "no agent matches 'router'. Agents: none was seen. A rollout ended with: the app raised "
        "KeyError: 'desk'"
    )


def _two_prompts(ask: Any, n: int) -> None:
    ask("router", ROUTER.format(day=n + 1))
    ask("router", OTHER)


REFUSED: dict[str, tuple[Callable[[Any, int], None], str]] = {
    "two prompts": (_two_prompts, "its 9 texts have nothing in common"),
    "parts": (lambda ask, n: ask("router", ROUTER, OTHER), "come in several parts"),
    "late": (lambda ask, n: ask("router", USER, ROUTER), "stands after other messages"),
    "none": (lambda ask, n: ask("router"), NO_INSTRUCTIONS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_learned_is_refused_by_name(ask: Any, name: str) -> None:
    """The error has the hint. If a glob matches more agents, the agent is left out and reported."""
    plays, reason = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        surveyed(lambda n: plays(ask, n), "router")
    said = str(caught.value)
    assert said.startswith("the instructions of the agent 'router' cannot be learned from its")
    assert reason in said
    assert said.endswith("text = lightspan.prompt('router', text)")

    def with_clerk(n: int) -> None:
        plays(ask, n)
        ask("clerk", "You are a clerk.")

    discovered = surveyed(with_clerk, "*")
    assert list(discovered.components) == ["clerk"]
    assert reason in discovered.left_out["router"]
    with pytest.raises(ConfigError, match="the agent 'router' cannot be learned"):
        surveyed(lambda n: plays(ask, n), "*")


def test_a_client_that_lightspan_does_not_see_is_named() -> None:
    class ChatOllama:
        base_url = "http://127.0.0.1:11434"

    def app(n: int) -> None:
        with agent("router"):
            current = current_agent()
            assert current is not None
            native = "langchain_openai.ChatOpenAI"
            record_call(current, {"model": "m"}, {}, start_ns=1, client=ChatOllama(), native=native)

    with pytest.raises(
        ConfigError, match=r"ChatOllama, which lightspan does not capture: use langchain_openai\."
    ):
        surveyed(app, "router")


def test_prompts_that_the_app_asks_for_go_first(ask: Any) -> None:
    """For an agent with two texts, each is learned under the name by which the app requests it."""

    def app(n: int) -> None:
        with agent("router"):
            first = prompt("router", "Which desk is {mail} for?").format(mail=n)
            second = prompt("sum", OTHER)
        ask("router", first)
        ask("router", second)
        ask("clerk", "You are a clerk.")

    discovered = surveyed(app, "router", "sum")
    assert {name: (each.place, each.template) for name, each in discovered.components.items()} == {
        "router": (PromptPlace.CODE, "Which desk is {mail} for?"),
        "sum": (PromptPlace.CODE, OTHER),
    }
    assert list(surveyed(app, "*").components) == ["router", "sum", "clerk"]


def test_a_prompt_that_is_filled_before_it_is_asked_for(ask: Any) -> None:
    def app(n: int) -> None:
        prompt("router", f"Which desk is {n} for?")

    with pytest.raises(ConfigError, match=r"got 8 different texts: pass the template"):
        surveyed(app, "router")


def test_what_became_of_each_text_is_counted(ask: Any) -> None:
    def app(n: int) -> None:
        ask("router", ROUTER.format(day=n + 1) if n < 6 else OTHER)
        ask("clerk", "You are a clerk.")
        if n == 7:
            ask("router", USER)
            ask("router2", "You are new.")

    def plain(n: int) -> None:
        ask("router", ROUTER.format(day=n + 1))

    discovered = surveyed(plain, "router*")
    told = discovered.instructions({"router": "Route it! {date_1}"})
    seen = [evidence_of(e, None, discovered.concerns) for e in played(app, told)]
    assert [each.applied for each in seen] == [1] * 6 + [0, 0]
    assert seen[6].kept == {f"router: {OTHER_TEXT}": 1}
    assert seen[7].kept == {
        f"router: {OTHER_TEXT}": 1,
        f"router: {NO_INSTRUCTIONS}": 1,
        f"router2: {NEW_AGENT}": 1,
    }
    assert seen[0].asked == ["router"]
    assert evidence_of(played(app, told, 1)[0], None).asked == []


@pytest.mark.parametrize("asking", ["router", "builder", ""])
@pytest.mark.parametrize("pattern", ["router", "*"])
def test_an_agent_that_asks_for_its_text(ask: Any, pattern: str, asking: str) -> None:
    """The agent, another one, or code outside of agents may request the text."""

    def app(n: int) -> None:
        with agent(asking) if asking else nullcontext():
            told = prompt("router", "Which desk? {mail}").format(mail=n)
        ask("router", told)
        ask("router", {**USER, "content": told})

    discovered = surveyed(app, pattern)
    assert discovered.components["router"].place is PromptPlace.CODE
    [episode] = played(app, discovered.instructions({"router": "Better: {mail}"}), 1)
    seen = evidence_of(episode, None, discovered.concerns)
    assert (seen.applied, seen.kept, seen.asked) == (1, {}, ["router"])
    first, _ = (call.span.attributes for call in episode.calls if call.span is not None)
    assert (first[c.PROMPT_APPLIED], first[c.PROMPT_REASON]) == (False, ASKS)


class Played:
    """Stand-in for the trainer's context that plays the rollouts of an app, each with reward 1."""

    def __init__(self, app: App, *patterns: str) -> None:
        self._app = app
        self._survey = Instructions(surveyed=list(patterns))
        self.tasks = 0

    async def rollouts(self, tasks: Any, *args: Any, resources: Any = None) -> list[Episode]:
        self.tasks += len(tasks)
        told = [self._survey] * len(tasks) if resources is None else resources
        texts = [one if isinstance(one, Instructions) else one[INSTRUCTIONS] for one in told]
        episodes = [played(self._app, one, 1)[0] for one in texts]
        return [
            replace(e, task_id=task_id(task), reward=1.0, reward_source="returned")
            for e, task in zip(episodes, tasks, strict=True)
        ]


@pytest.mark.parametrize("is_named", [True, False])
async def test_a_text_that_was_changed_before_a_resume_is_refused(
    ask: Any, tmp_path: Path, is_named: bool
) -> None:
    """No rollout after the first is paid for, and nothing of it is logged."""

    def app_with(text: str) -> App:
        return lambda n: ask("desk", prompt("desk", text) if is_named else text)

    def trials(text: str) -> tuple[Evaluator, Played]:
        runs = Played(app_with(text), "desk")
        return Evaluator(runs, {}, SearchLog(tmp_path / "gepa.jsonl", "gepa"), 0.0), runs

    first, _ = trials(OTHER)
    await first.begin([0, 1], ["desk"], print)
    before = (tmp_path / "gepa.jsonl").read_bytes()
    again, runs = trials("Another text, written by the user meanwhile.")
    prompts = await again.begin([0, 1], ["desk"], print)
    await again.evaluate([Trial("selection", {"desk": OTHER}, [0, 1])])  # the survey's rollouts
    new = Trial("feedback", {"desk": prompts["desk"].template + " Briefly."}, [2, 3])
    with pytest.raises(ConfigError, match=r"text of 'desk' has changed since .* restore it"):
        await again.evaluate([new])
    assert runs.tasks == 2
    same, _ = trials(OTHER)
    await same.begin([0, 1], ["desk"], print)
    await same.evaluate([Trial("selection", {"desk": OTHER}, [0, 1])])
    assert (tmp_path / "gepa.jsonl").read_bytes().startswith(before)
    [evaluation] = await same.evaluate([new])
    assert [one.sent for one in evaluation.seen] == [["desk"], ["desk"]]


@pytest.mark.parametrize("is_sent", [True, False])
async def test_a_text_that_was_never_sent_is_not_chosen(
    ask: Any, tmp_path: Path, is_sent: bool
) -> None:
    """The agent's text varies, or it is not called: no reward is that of the candidate."""
    is_learned = True

    def app(n: int) -> None:
        ask("clerk", "You are a clerk.")
        if is_learned or is_sent:
            ask("desk", OTHER)

    trials = Evaluator(
        Played(app, "desk", "clerk"), {}, SearchLog(tmp_path / "gepa.jsonl", "gepa"), 0.0
    )
    await trials.begin([0, 1], ["desk", "clerk"], print)
    is_learned = False
    texts = {"desk": "Sum up.", "clerk": "You are a clerk."}
    first, second = await trials.evaluate(
        [Trial("selection", {**texts, "desk": OTHER}, [0, 1]), Trial("selection", texts, [0, 1])]
    )
    new = Candidate(templates=texts, parents=[0], rewards={}, mean=0.0, rollouts=0)
    old = msgspec.structs.replace(new, templates={**texts, "desk": OTHER}, parents=[])
    assert trials.with_rewards(new, [second.seen]).is_scored is is_sent
    assert trials.with_rewards(old, [first.seen]).is_scored


async def test_a_survey_without_any_reward_is_not_kept(ask: Any, tmp_path: Path) -> None:
    class Runs:
        async def rollouts(self, tasks: Any, *args: Any, **given: Any) -> list[Episode]:
            return played(lambda n: ask("clerk", OTHER), Instructions(surveyed=["*"]), len(tasks))

    journal = SearchLog(tmp_path / "gepa.jsonl", "gepa")
    begun = journal.path.read_bytes()
    trials = Evaluator(Runs(), {}, journal, 0.0)
    with pytest.raises(RewardError, match="no rollout of the initial prompts has a reward"):
        await trials.survey([1, 2], ["*"], print)
    assert journal.path.read_bytes() == begun


def test_the_text_of_a_call_that_another_span_tells() -> None:
    """The gateway records a call with the sent text only; a second span has the app's own text."""
    told = Instructions(surveyed=["router"])
    scope = AttemptContext(rollout_id="ro-1", attempt_id="at-1", instructions=told)
    with open_scope(scope), agent("router"):
        current = current_agent()
        assert current is not None
        record_call(current, {"model": "m", "messages": [USER]}, {}, start_ns=1)
        (call,) = spans = scope.recorder.drain()
        call_id = call.attributes[c.CALL_ID]
        record_prompt(current, {c.PROMPT_CALL: call_id, c.PROMPT_ORIGINAL: OTHER})
    spans += scope.recorder.drain()
    discovered = survey([episode_of("1", spans)], ["router"])
    assert discovered.components["router"].template == OTHER
