"""What every adapter must do, scenario by scenario: the real framework, scripted model.

A test file of an adapter subclasses `AdapterSuite` and says how its framework expresses each
scenario, and what is to be recorded:

    class TestSuite(AdapterSuite):
        framework = "autogen"

        def build(self, scenario: str, model: Model) -> App: ...
        def patched(self) -> Mapping[str, Any]: ...

`build` is called outside any scope and (for `built_at_import`) before `instrument()`. Each agent's
instructions are `instructions(name)`, so that the scripted model knows who asks without the
adapter. Every scenario runs asynchronous, synchronous and streamed, against the app's own endpoint
(calls recorded) and through a gateway (calls trained): whole span trees and token records are
compared.

A cell that a framework cannot have is in `IMPOSSIBLE`, with its reason; it must then really fail.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

import pytest

import lightspan
from lightspan import conventions as c
from lightspan import threads, wire
from lightspan.emit import operation
from lightspan.errors import ConfigError
from lightspan.recording import sampled
from lightspan.records import Attempt, AttemptStatus, Rollout
from lightspan.routing import Route, agent_name, split_path
from lightspan.scope import Scope, open_scope
from lightspan.spans import Span, SpanKind, SpanStatus, decode_spans, encode_spans
from lightspan.testing.recorded import Recorded, read_recorded
from lightspan.testing.stage import (
    POLICY,
    ROOT_ID,
    Part,
    Played,
    Says,
    Stage,
    Turn,
    sampled_text,
)

MODES: Final = ("async", "sync", "stream")
ROUTES: Final = ("app", "gateway")
CONCURRENT: Final = 32


class Impossible(Exception):
    """`build` raises it for a scenario that its framework cannot express."""


# --- what the suite gives -------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How the app's own model client is to be made."""

    base_url: str
    api_key: str = "key"
    name: str = "m"
    stream: bool = False
    """Whether the app's model calls are to be streamed."""
    max_retries: int = 0
    timeout_s: float = 30.0


def instructions(name: str) -> str:
    """The system message of an agent."""
    return f"You are {name}."


def look(what: str) -> str:
    """Look something up."""
    return f"{what}: 7"


def count(what: str) -> str:
    """Count something."""
    return f"{len(what)} letters"


def broken(what: str) -> str:
    """Fail."""
    raise LookupError(f"nothing known of {what}")


BYPASSED: Final = "Done by other means."
"""What a model client says that does not use the OpenAI SDK."""
LOOK: Final = Turn(calls=[("look", '{"what": "seven"}')])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row of the table."""

    says: Says
    """What each agent says, unless the app brings its own."""
    about: str
    ordered: bool = True
    """False: what happens at once may be recorded in any order."""
    modes: Sequence[str] = MODES
    max_retries: int = 0
    timeout_s: float = 30.0
    cancelled: bool = False
    """The app is cancelled while its first model call is under way."""
    bypassing: bool = False
    """The app's model client does not use the OpenAI SDK: nobody of ours is asked."""


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "single": Scenario(
        about="one agent, `writer`, answers",
        says={"writer": ["A draft of {task}."]},
    ),
    "team": Scenario(
        about="`writer`, then `checker`",
        says={"writer": ["A draft of {task}."], "checker": ["{task} is good."]},
    ),
    "nested": Scenario(
        about="a team `drafting` of `writer` and `checker` inside another, then `judge`",
        says={
            "writer": ["A draft of {task}."],
            "checker": ["{task} is good."],
            "judge": ["{task} wins."],
        },
    ),
    "parallel": Scenario(
        about="`planner`, then `left` and `right` at once, then `joiner`",
        ordered=False,
        says={
            "planner": ["Plan {task}."],
            "left": [Turn(text="Left of {task}.", delay_s=0.05)],
            "right": [Turn(text="Right of {task}.", delay_s=0.05)],
            "joiner": ["Both of {task}."],
        },
    ),
    "tools": Scenario(
        about="`scout` calls the tool `look`, then answers",
        says={"scout": [LOOK, "Seven, for {task}."]},
    ),
    "parallel_tools": Scenario(
        about="`scout` calls `look` and `count` in one answer, then answers",
        ordered=False,
        says={
            "scout": [
                Turn(calls=[("look", '{"what": "seven"}'), ("count", '{"what": "seven"}')]),
                "Seven, for {task}.",
            ]
        },
    ),
    "handoff": Scenario(
        about="`triage` hands off to `expert`, who answers",
        says={
            "triage": [Turn(calls=[("transfer_to_expert", "{}")])],
            "expert": ["Done: {task}."],
        },
    ),
    "agent_as_tool": Scenario(
        about="`boss` asks `expert` as a tool; the expert uses its own tool `look`",
        says={
            "boss": [Turn(calls=[("expert", '{"task": "help with {task}"}')]), "Thanks: {task}."],
            "expert": [LOOK, "It is seven, {task}."],
        },
    ),
    "same_name": Scenario(
        about="two agents called `writer`, told apart by their paths",
        says={"writer": ["A text for {task}."]},
    ),
    "unicode": Scenario(
        about="an agent called `Prüferin日本`",
        says={"Prüferin日本": ["Gut: {task}."]},
    ),
    "tool_error": Scenario(
        about="`scout` calls the tool `broken`, which raises",
        says={"scout": [Turn(calls=[("broken", '{"what": "it"}')]), "No luck with {task}."]},
    ),
    "model_error": Scenario(
        about="the model of `writer` fails (400); the app raises",
        says={"writer": [Turn(text="refused", status=400)]},
    ),
    "retry": Scenario(
        about="the endpoint of `writer` fails once (500) and the client tries again: one call",
        says={"writer": [Turn(text="busy", status=500), "A draft of {task}."]},
        max_retries=1,
    ),
    "timeout": Scenario(
        about="the client of `writer` gives up after 0.2 s; the app raises",
        says={"writer": [Turn(text="Late, {task}.", delay_s=0.6)]},
        timeout_s=0.2,
    ),
    "cancelled": Scenario(
        about="the app is cancelled while `writer`'s model is thinking",
        says={"writer": [Turn(text="Late, {task}.", delay_s=0.6)]},
        modes=("async", "stream"),
        cancelled=True,
    ),
    "bypassing": Scenario(
        about="`writer`'s model client, the user's own, does not use the OpenAI SDK",
        says={},
        bypassing=True,
    ),
}
"""The table's rows; its columns are the frameworks, its cells the modes and routes."""

IN_PRODUCTION: Final = (
    "single",
    "team",
    "nested",
    "parallel",
    "parallel_tools",
    "handoff",
    "agent_as_tool",
    "model_error",
    "cancelled",
)
"""The scenarios that are played outside every scope, too."""

CONNECTED: Final = ("single", "team", "nested", "parallel", "agent_as_tool")
"""The scenarios that are played through a server of the trained policies."""

SEVERAL_RUNS: Final[Mapping[str, Collection[str]]] = {
    "openai_agents": ("team", "nested", "parallel"),
}
"""Framework → scenarios that it has no word for: the app runs one agent after the other. In
production such an app says itself what belongs together."""

IMPOSSIBLE: Final[Mapping[str, Mapping[str, str]]] = {
    "langgraph": {},
    "autogen": {
        "two_event_loops/team": "AutoGen binds a team's message queue to the loop of its first run",
    },
    "openai_agents": {},
    "crewai": {"handoff": "CrewAI has none: an agent delegates, and gets the answer back"},
}
"""Framework → scenario, or scenario/mode, or test → why it cannot be."""


# --- what a subclass gives ------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """An app that plays one scenario, built but not yet run."""

    run: Callable[[str], Awaitable[Any]]
    """Runs it once on a text, which must reach every prompt. May be called again and again."""
    tree: str
    """What is recorded: a line per span, indented by depth, in the order of their start.

    `invoke_agent NAME @PATH`, `execute_tool NAME @PATH` and `chat @PATH`, followed by ` error` or
    ` unset` if that is the status. Example:

        invoke_agent writer @writer
          chat @writer
    """
    target: Any = None
    """What the adapter's `agents()` takes."""
    run_sync: Callable[[str], Any] | None = None
    """The framework's synchronous way; None for `asyncio.run` around `run`."""
    says: Says = field(default_factory=dict)
    """Agent → turns that differ from the scenario's, such as other names of tools."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Text in a prompt → who asks, for prompts of the framework's own (managers, selectors)."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Who asks → the innermost name of its path, where they differ."""
    raises: type[BaseException] | tuple[type[BaseException], ...] | None = None
    """What `run` raises (cancellation aside)."""
    close: Callable[[], Awaitable[Any]] | None = None
    """Closes its client; called in the loop that `run` ran in, if the client was used."""
    concurrent: bool = True
    """Whether one app may run several attempts at once; otherwise each gets one of its own."""
    complete: bool = True
    """Whether `agents()` can know that there are no others."""


@dataclass(slots=True)
class Tally:
    """The model calls of all attempts that the suite played and checked."""

    made: int = 0
    """That the framework made; the retries of a client are one call."""
    recorded: int = 0
    named: int = 0
    """Recorded under the name of the agent that the prompt shows."""
    answered: int = 0
    """That the gateway answered in full."""
    joined: int = 0
    """Those whose tokens are recorded, and joined to their span and agent."""

    def add(self, played: Played, app: App, stage: Stage) -> None:
        """Count the calls of an attempt."""
        spans = {span.span_id: span for span in llm_spans(played)}
        asked = [asked for asked in stage.brain.of(played.tag) if asked.turn.status < 500]
        self.made += len(asked) or len(_calls(app.tree))  # or a client of the user's own was
        self.recorded += len(spans)
        self.named += sum(_is_named(span, app) for span in spans.values())
        if not played.through_gateway:
            return
        self.answered += len(_said(played, stage))
        self.joined += sum(
            record.span_id in spans and record.agent_path == path_of(spans[record.span_id])
            for record in played.records
            if record.response_ids
        )

    def __str__(self) -> str:
        return (
            f"{self.made} model calls made, {self.recorded} recorded, {self.named} named; "
            f"{self.answered} answered by the gateway, {self.joined} joined to their tokens"
        )

    def assert_complete(self) -> None:
        """Fail unless every call was recorded, named and joined to its tokens."""
        assert (self.recorded, self.named, self.joined) == (self.made, self.made, self.answered)


class AdapterSuite:
    """See the module."""

    framework: ClassVar[str]
    """A key of `IMPOSSIBLE`; the adapter is `lightspan_<framework>`."""
    tally: ClassVar[Tally] = Tally()
    """Of the whole suite; each subclass has its own while its tests run."""

    # --- hooks ----------------------------------------------------------------------------
    def build(self, scenario: str, model: Model) -> App:
        """An app that plays the scenario."""
        raise NotImplementedError

    def patched(self) -> Mapping[str, Any]:
        """Every attribute of the framework that `instrument` may change: name → value now."""
        raise NotImplementedError

    def openinference(self) -> AbstractContextManager[Any]:
        """OpenInference's instrumentation of the framework, for the duration of a block."""
        pytest.skip("no OpenInference instrumentation is named for this framework")

    silent_environment: ClassVar[Mapping[str, str]] = {"OTEL_SDK_DISABLED": "true"}
    """Variables that switch off all telemetry, the framework's own too."""
    loud_environment: ClassVar[Mapping[str, str]] = {}
    """Variables that switch on the framework's own telemetry, which must not leave the machine."""

    def check_telemetry(self, is_on: bool) -> None:
        """Fail unless the framework's own telemetry was on or off in this process."""

    program: ClassVar[str] = ""
    """A script that knows nothing of lightspan: `single`, with the endpoint and the text as its
    arguments."""

    # --- helpers --------------------------------------------------------------------------
    @property
    def adapter(self) -> Any:
        """The adapter's module."""
        return importlib.import_module(f"lightspan_{self.framework}")

    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls) -> Iterator[Stage]:
        with Stage() as stage:
            yield stage

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _tally(cls, request: pytest.FixtureRequest) -> Iterator[None]:
        """Counts the calls of the whole suite; the count is printed at its end."""
        cls.tally = Tally()
        yield
        _report(request.config, f"{cls.__name__} of {cls.framework}: {cls.tally}")
        cls.tally.assert_complete()

    @pytest.fixture(autouse=True)
    def _problems(self, stage: Stage) -> Iterator[None]:
        yield
        problems, stage.brain.problems = stage.brain.problems, []
        assert problems == []

    def expects(self, request: pytest.FixtureRequest, *keys: str) -> None:
        """Mark the running test as one that has to fail, if the table says so."""
        reasons = IMPOSSIBLE[self.framework]
        for key in keys:
            if key in reasons:
                mark = pytest.mark.xfail(reason=reasons[key], strict=True, raises=_IMPOSSIBLE)
                request.applymarker(mark)

    def app(self, stage: Stage, scenario: str, mode: str = "async") -> App:
        """The scenario's app, with the scenario's client."""
        row = SCENARIOS[scenario]
        model = Model(
            base_url=stage.url,
            stream=mode == "stream",
            max_retries=row.max_retries,
            timeout_s=row.timeout_s,
        )
        return self.build(scenario, model)

    def check(self, played: Played, scenario: str, app: App, stage: Stage) -> None:
        """Everything that must hold of what was recorded."""
        self.tally.add(played, app, stage)
        expected = textwrap.dedent(app.tree).strip("\n").splitlines()
        lines = tree(played.spans, ordered=SCENARIOS[scenario].ordered)
        if played.through_gateway:  # which says of a cancelled call that it was, not that it failed
            expected, lines = _without_call_status(expected), _without_call_status(lines)
        expected = ordered(expected, SCENARIOS[scenario].ordered)
        assert lines == expected, "\n".join(["recorded:", *lines, "expected:", *expected])
        check_names(played, app)
        check_attributes(played)
        if SCENARIOS[scenario].bypassing:
            check_bypassing(played, stage)
            return
        check_calls(played, stage)
        if played.through_gateway:
            check_tokens(played, stage)

    # --- the table ------------------------------------------------------------------------
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_scenario(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str, mode: str, route: str
    ) -> None:
        if mode not in SCENARIOS[scenario].modes:
            pytest.skip(f"{scenario} has no {mode} form")
        self.expects(request, scenario, f"{scenario}/{mode}", f"{scenario}/{mode}/{route}", mode)
        app = self.app(stage, scenario, mode)
        with self.adapter.instrument():
            played = play(stage, app, scenario, mode, through_gateway=route == "gateway")
        self.check(played, scenario, app, stage)

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_agents(self, request: pytest.FixtureRequest, stage: Stage, scenario: str) -> None:
        """`agents()` knows every agent that calls a model, without running the app."""
        self.expects(request, scenario, "agents", f"agents/{scenario}")
        app = self.app(stage, scenario)
        paths, complete = self.adapter.agents(app.target)
        assert len(set(paths)) == len(paths)
        assert _calling(app.tree) <= set(paths)
        assert complete is app.complete

    # --- threads, concurrency -------------------------------------------------------------
    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_in_a_thread_of_the_app(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str
    ) -> None:
        """The app starts its framework in a thread of its own, inside a runner."""
        self.expects(request, scenario, f"{scenario}/sync", "sync", "thread")
        app = self.app(stage, scenario, "sync")
        part = part_of(app, scenario)
        played = stage.open(part, through_gateway=True)
        threads.carry()
        try:
            with (
                self.adapter.instrument(),
                open_scope(played.scope),
                ThreadPoolExecutor(1) as pool,
            ):
                pool.submit(run_sync, app, played).result()
        finally:
            threads.stop_carrying()
        stage.close(played)
        self.check(played, scenario, app, stage)

    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("scenario", ["team", "parallel_tools", "agent_as_tool"])
    def test_32_at_once(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str, route: str
    ) -> None:
        """32 attempts in one event loop: no call lost, doubled, misnamed or in another attempt."""
        self.expects(request, scenario, f"{scenario}/async", "async", "32_at_once")
        apps = self._apps(stage, scenario, "async")
        part = part_of(apps[0], scenario)
        played = [stage.open(part, through_gateway=route == "gateway") for _ in apps]

        async def one(app: App, attempt: Played) -> None:
            with open_scope(attempt.scope):
                await app.run(attempt.text)

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                for app, attempt in zip(apps, played, strict=True):
                    group.create_task(one(app, attempt))
            await _close(apps, played[0])

        with self.adapter.instrument():
            asyncio.run(all_of_them())
        self._check_all(stage, scenario, apps, played)

    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_32_threads(self, request: pytest.FixtureRequest, stage: Stage, scenario: str) -> None:
        """32 attempts, each in a worker thread, as a runner runs synchronous apps."""
        self.expects(request, scenario, f"{scenario}/sync", "sync", "32_threads")
        apps = self._apps(stage, scenario, "sync")
        part = part_of(apps[0], scenario)
        played = [stage.open(part, through_gateway=True) for _ in apps]

        def one(app: App, attempt: Played) -> None:
            with open_scope(attempt.scope):
                run_sync(app, attempt)

        with self.adapter.instrument(), ThreadPoolExecutor(CONCURRENT) as pool:
            for future in [pool.submit(one, *pair) for pair in zip(apps, played, strict=True)]:
                future.result()
        wire.close()
        self._check_all(stage, scenario, apps, played)

    def _apps(self, stage: Stage, scenario: str, mode: str) -> list[App]:
        app = self.app(stage, scenario, mode)
        if app.concurrent:
            return [app] * CONCURRENT
        return [app, *(self.app(stage, scenario, mode) for _ in range(CONCURRENT - 1))]

    def _check_all(
        self, stage: Stage, scenario: str, apps: Sequence[App], played: Sequence[Played]
    ) -> None:
        for app, attempt in zip(apps, played, strict=True):
            stage.close(attempt)
            self.check(attempt, scenario, app, stage)
        span_ids = [span.span_id for attempt in played for span in attempt.spans]
        assert len(set(span_ids)) == len(span_ids)

    # --- production -----------------------------------------------------------------------
    @pytest.fixture
    def production(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """The URL of the store that the environment names."""
        url = f"sqlite:{tmp_path / 'production.db'}"
        monkeypatch.setenv("LIGHTSPAN_STORE", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "support")
        return url

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("scenario", IN_PRODUCTION)
    def test_production(
        self,
        request: pytest.FixtureRequest,
        stage: Stage,
        production: str,
        scenario: str,
        mode: str,
    ) -> None:
        """Outside every scope the app is one attempt of its own, with the same tree inside it."""
        if mode not in SCENARIOS[scenario].modes:
            pytest.skip(f"{scenario} has no {mode} form")
        self.expects(request, scenario, f"{scenario}/{mode}", f"{scenario}/{mode}/app", mode)
        app = self._together(self.app(stage, scenario, mode), scenario)
        with self.adapter.instrument():
            played = play_outside(stage, app, scenario, mode)
        [found] = read_recorded(production)
        self.check(inside_root(found, played), scenario, app, stage)
        ended = SCENARIOS[scenario].cancelled or app.raises is not None
        assert found.attempt.status == ("failed" if ended else "succeeded")
        assert (found.attempt.damage, found.rollout.run_id) == ([], "support")
        assert played.tag in json.dumps(found.rollout.task)
        assert all(span.resource == {"service.name": "support"} for span in found.spans)

    def test_production_at_once(
        self,
        request: pytest.FixtureRequest,
        stage: Stage,
        production: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Many in one event loop, each an attempt; half of them are kept whole, the rest not."""
        self.expects(request, "team", "team/async", "async", "32_at_once")
        monkeypatch.setenv("LIGHTSPAN_SAMPLE", "0.5")
        apps = [self._together(app, "team") for app in self._apps(stage, "team", "async")]
        played = [stage.open(part_of(app, "team"), through_gateway=False) for app in apps]
        # the app's own traces: what they say of the share decides
        step = 2**64 // CONCURRENT
        traces = [(number + 1) << 64 | number * step for number in range(CONCURRENT)]

        async def one(app: App, attempt: Played, trace_id: int) -> None:
            with _in_trace(trace_id):
                await app.run(attempt.text)

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                for app, attempt, trace_id in zip(apps, played, traces, strict=True):
                    group.create_task(one(app, attempt, trace_id))
            await _close(apps, played[0])

        with self.adapter.instrument():
            asyncio.run(all_of_them())
        kept = {
            f"{trace_id:032x}": attempt
            for attempt, trace_id in zip(played, traces, strict=True)
            if sampled(f"{trace_id:032x}", 0.5)
        }
        assert list(kept.values()) == played[: CONCURRENT // 2]
        for attempt in played:
            assert len(stage.brain.of(attempt.tag)) == len(_calls(apps[0].tree))
        recorded = read_recorded(production)
        assert len(recorded) == len(kept)
        for found in recorded:
            attempt = kept.pop(found.spans[0].trace_id)
            assert set(re.findall(r"task-\d+", json.dumps(found.rollout.task))) == {attempt.tag}
            self.check(inside_root(found, attempt), "team", apps[0], stage)

    # --- a server of the trained policies ---------------------------------------------------
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("scenario", CONNECTED)
    def test_connected(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str, mode: str
    ) -> None:
        """Outside every scope, with `lightspan.connect`: each agent's calls reach its policy."""
        self.expects(request, scenario, f"{scenario}/{mode}", mode)
        self._connected(stage, self.app(stage, scenario, mode), scenario, mode)

    def test_connected_and_recorded(
        self, request: pytest.FixtureRequest, stage: Stage, production: str
    ) -> None:
        """Both at once: each agent's calls reach its policy, and the store has the attempt."""
        self.expects(request, "team", "team/async", "async")
        app = self._together(self.app(stage, "team"), "team")
        played = self._connected(stage, app, "team", "async")
        [found] = read_recorded(production)
        recorded = inside_root(found, played)
        expected = textwrap.dedent(app.tree).strip("\n").splitlines()
        assert tree(recorded.spans) == expected, found.tree()
        check_names(recorded, app)

    def _connected(self, stage: Stage, app: App, scenario: str, mode: str) -> Played:
        """Run the app through a server, and check who was answered by which policy."""
        before = len(stage.answered)
        paths = _calls(app.tree)
        with (
            stage.serving(paths) as served,
            self.adapter.instrument(),
            lightspan.connect(served.url),
        ):
            played = play_outside(stage, app, scenario, mode)
            wire.close()
        assert served.usage.failed == 0
        assert served.usage.summary() == {path: {path: n} for path, n in Counter(paths).items()}
        for asked, policy in stage.answered[before:]:
            assert app.names.get(asked, asked) == agent_name(policy)
        return played

    def _together(self, app: App, scenario: str) -> App:
        """An app whose runs are one attempt."""
        if scenario not in SEVERAL_RUNS.get(self.framework, ()):
            return app

        async def run(text: str) -> Any:
            with operation("handle", input=text):
                return await app.run(text)

        return replace(app, run=run, run_sync=None)

    # --- installing -----------------------------------------------------------------------
    def test_public_names(self) -> None:
        names = list(self.adapter.__all__)
        assert names[-3:] == ["agents", "instrument", "uninstrument"]
        assert len(names) == 4
        assert names[0].startswith("Lightspan")
        assert all(hasattr(self.adapter, name) for name in names)

    def test_a_framework_that_is_absent_too_old_or_too_new(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each is said at the import, with what to do; the floor is that of the package."""
        versions = importlib.import_module(f"{self.adapter.__name__}._versions")
        framework, floor = versions.FRAMEWORK, versions.FLOOR
        distribution = self.adapter.__name__.replace("_", "-")
        assert f"{framework}>={floor}" in (importlib.metadata.requires(distribution) or [])
        for found, complaint in (
            (None, f"^{framework} is not installed in this environment: pip install"),
            ("0.0.1", f"^{framework} 0.0.1 is older than {floor}, which this needs: pip install"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr("lightspan.instrumentation.version", _version_of(found))
                with pytest.raises(ConfigError, match=complaint):
                    _imported_again(self.adapter)
        complaint = f"this {distribution} does not know {framework} .*: upgrade {distribution}, or"
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, f"{self.adapter.__name__}._hook", None)
            with pytest.raises(ImportError, match=complaint):
                _imported_again(self.adapter)
        assert _imported_again(self.adapter).__all__ == self.adapter.__all__

    def test_installed_twice(self, request: pytest.FixtureRequest, stage: Stage) -> None:
        """Twice is once, and the inner block's end leaves the outer one installed."""
        self.expects(request, "team")
        before = dict(self.patched())
        with self.adapter.instrument():
            once = dict(self.patched())
            with self.adapter.instrument():
                assert_unchanged(once, self.patched())
                self._play_and_check(stage, "team")
            assert_unchanged(once, self.patched())
            self._play_and_check(stage, "team")
        assert_unchanged(before, self.patched())

    def test_uninstalled(self, request: pytest.FixtureRequest, stage: Stage) -> None:
        """The framework's attributes are what they were; calls are recorded without names."""
        self.expects(request, "team")
        before = dict(self.patched())
        self.adapter.instrument()
        assert changed(before, self.patched()), "`patched` must show what `instrument` changes"
        self.adapter.uninstrument()
        self.adapter.uninstrument()
        assert_unchanged(before, self.patched())
        app = self.app(stage, "team")
        played = play(stage, app, "team", "async", through_gateway=True)
        names = {line.split(" @")[1] for line in tree(played.spans)}
        assert names == {c.UNNAMED_AGENT}
        check_calls(played, stage)

    def test_outside_a_scope(self, request: pytest.FixtureRequest, stage: Stage) -> None:
        """Nothing is recorded, and the app gets what it would get without an adapter."""
        self.expects(request, "team")
        app = self.app(stage, "team")
        played = stage.open(part_of(app, "team"), through_gateway=False)
        with self.adapter.instrument():
            run_sync(replace(app, run_sync=None), played)
        assert len(stage.brain.of(played.tag)) == len(_calls(app.tree))
        stage.close(played)
        assert played.spans == []

    def test_the_entry_point(self, request: pytest.FixtureRequest, stage: Stage) -> None:
        """What `opentelemetry-instrument` loads, and calls as it does."""
        self.expects(request, "team")
        found = [
            point
            for point in importlib.metadata.entry_points(group="opentelemetry_instrumentor")
            if point.value.partition(":")[0].partition(".")[0] == self.adapter.__name__
        ]
        assert len(found) == 1
        before = dict(self.patched())
        instrumentor = found[0].load()()
        instrumentor.instrument(skip_dep_check=True)
        try:
            assert changed(before, self.patched())
            self._play_and_check(stage, "team")
        finally:
            instrumentor.uninstrument()
        assert_unchanged(before, self.patched())

    def test_started_by_opentelemetry(
        self, request: pytest.FixtureRequest, stage: Stage, production: str, tmp_path: Path
    ) -> None:
        """`opentelemetry-instrument python app.py` records an app without a line of ours."""
        pytest.importorskip("opentelemetry.distro")
        self.expects(request, "single")
        if not self.program:
            pytest.skip("the suite's `program` is not given")
        assert "lightspan" not in self.program
        app = self.app(stage, "single")
        played = stage.open(part_of(app, "single"), through_gateway=False)
        script = tmp_path / "app.py"
        script.write_text(textwrap.dedent(self.program))
        command = Path(sys.executable).with_name("opentelemetry-instrument")
        exporters = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}
        done = subprocess.run(
            [command, sys.executable, script, stage.url, played.text],
            env={**os.environ, **exporters, **_NO_WAY_OUT},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert f"A draft of {played.tag}." in done.stdout
        [found] = read_recorded(production)
        assert (found.attempt.status, found.attempt.damage) == ("succeeded", [])
        self.check(inside_root(found, played), "single", app, stage)

    def test_opentelemetrys_provider_is_the_apps(
        self, request: pytest.FixtureRequest, stage: Stage
    ) -> None:
        """None is set or asked for: an app may set its own at any time."""
        from opentelemetry import trace

        self.expects(request, "team")
        before = trace.get_tracer_provider()
        with self.adapter.instrument():
            self._play_and_check(stage, "team")
            assert trace.get_tracer_provider() is before

    # --- surroundings ---------------------------------------------------------------------
    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_inside_another_frame(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str
    ) -> None:
        """Paths concatenate: the frames that are pushed around the framework come first."""
        from lightspan import agent

        self.expects(request, scenario, "inside_another_frame")
        app = self.app(stage, scenario)

        async def run(text: str) -> Any:
            with agent("outer"):
                return await app.run(text)

        nested = replace(app, run=run, run_sync=None, tree=_inside("outer", app.tree))
        with self.adapter.instrument():
            played = play(stage, nested, scenario, "async", through_gateway=True)
        self.check(played, scenario, nested, stage)

    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_openinference_beside_it(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str
    ) -> None:
        """Another instrumentation before or after ours: neither doubles nor loses a call."""
        self.expects(request, scenario, "openinference")
        self.check_beside(stage, scenario, self.openinference)

    def check_beside(
        self, stage: Stage, scenario: str, other: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Play the scenario with another instrumentation, installed first and installed last."""
        for first, second in (
            (other, self.adapter.instrument),
            (self.adapter.instrument, other),
        ):
            app = self.app(stage, scenario)
            with first(), second():
                played = play(stage, app, scenario, "async", through_gateway=True)
            self.check(played, scenario, app, stage)

    @pytest.mark.parametrize("scenario", ["single", "team", "agent_as_tool"])
    def test_two_event_loops(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str
    ) -> None:
        """One app, built once, in one loop after the other."""
        self.expects(request, scenario, f"two_event_loops/{scenario}")
        app = self.app(stage, scenario)
        with self.adapter.instrument():
            for _ in range(2):
                played = play(stage, app, scenario, "async", through_gateway=True)
                self.check(played, scenario, app, stage)

    @pytest.mark.parametrize("telemetry", ["on", "off"])
    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_built_at_import(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str, telemetry: str
    ) -> None:
        """App and client built at import, `instrument()` after; telemetry on and off."""
        self.expects(request, scenario, "built_at_import", f"telemetry_{telemetry}")
        model = Model(base_url=stage.url)
        app = self.build(scenario, model)
        part = part_of(app, scenario)
        played = [stage.open(part, through_gateway=True) for _ in range(2)]
        told = {
            "file": sys.modules[type(self).__module__].__file__,
            "suite": type(self).__qualname__,
            "scenario": scenario,
            "url": stage.url,
            "scopes": [_scope_as_json(attempt) for attempt in played],
            "telemetry": telemetry == "on",
        }
        environment = self.loud_environment if telemetry == "on" else self.silent_environment
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", _CHILD],
            input=json.dumps(told),
            env={**os.environ, **environment, **_NO_WAY_OUT},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("spans:")]
        for attempt, line in zip(played, lines, strict=True):
            attempt.spans += decode_spans(bytes.fromhex(line.removeprefix("spans:")))
            stage.close(attempt)
            self.check(attempt, scenario, app, stage)

    def _play_and_check(self, stage: Stage, scenario: str) -> None:
        app = self.app(stage, scenario)
        played = play(stage, app, scenario, "async", through_gateway=False)
        self.check(played, scenario, app, stage)


_NO_WAY_OUT: Final = {
    **dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
    ),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}
"""Another process, whose connections nobody watches, finds no other machine."""
_IMPOSSIBLE: Final = (Impossible, AssertionError, RuntimeError)


def _version_of(found: str | None) -> Callable[[str], str]:
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    return version


def _imported_again(module: ModuleType) -> ModuleType:
    """The module's code run anew, beside the one that is imported."""
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


def _report(config: pytest.Config, line: str) -> None:
    """Print a line, whatever pytest captures."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
        print(f"\n{line}", flush=True)


# --- running an app -------------------------------------------------------------------------
def _in_trace(trace_id: int) -> AbstractContextManager[Any]:
    """A trace of the app's own is under way."""
    from opentelemetry import trace

    context = trace.SpanContext(trace_id, 1, is_remote=True)
    return trace.use_span(trace.NonRecordingSpan(context))


def part_of(app: App, scenario: str) -> Part:
    """What the agents say in an attempt of this app."""
    return Part({**SCENARIOS[scenario].says, **app.says}, app.marks)


def play(stage: Stage, app: App, scenario: str, mode: str, *, through_gateway: bool) -> Played:
    """Run one attempt to its end, whatever end the scenario has."""
    played = stage.open(part_of(app, scenario), through_gateway=through_gateway)
    expected: Any = nullcontext()
    if SCENARIOS[scenario].cancelled:
        expected = pytest.raises(asyncio.CancelledError)
    elif app.raises is not None:
        expected = pytest.raises(app.raises)
    with expected, open_scope(played.scope):
        if mode == "sync":
            run_sync(app, played)
        else:
            asyncio.run(_attempt(stage, app, played, is_cancelled=SCENARIOS[scenario].cancelled))
    wire.close()
    _settle(stage, played)
    stage.close(played)
    return played


def play_outside(stage: Stage, app: App, scenario: str, mode: str) -> Played:
    """Run the app once outside every scope, as in production."""
    played = stage.open(part_of(app, scenario), through_gateway=False)
    is_cancelled = SCENARIOS[scenario].cancelled
    expected: Any = nullcontext()
    if is_cancelled or app.raises is not None:
        expected = pytest.raises(asyncio.CancelledError if is_cancelled else app.raises or ())
    with expected:
        if mode == "sync":
            run_sync(app, played)
        else:
            asyncio.run(_attempt(stage, app, played, is_cancelled=is_cancelled))
    return played


def inside_root(found: Recorded, played: Played) -> Played:
    """What production recorded, without the span of the attempt itself."""
    roots = [span for span in found.spans if span.parent_id is None]
    assert [root.kind for root in roots] == [SpanKind.CHAIN], found.tree()
    [root] = roots
    around = [root, *(span for span in found.spans if span.kind is SpanKind.OPERATION)]
    scope = Scope(
        rollout_id=found.rollout.rollout_id,
        attempt_id=found.attempt.attempt_id,
        trace_id=root.trace_id,
        root_span_id=ROOT_ID,
    )
    spans = [
        span.replace(parent_id=ROOT_ID) if span.parent_id == around[-1].span_id else span
        for span in found.spans
        if span not in around
    ]
    return Played(played.tag, scope, False, spans=spans)


async def _attempt(stage: Stage, app: App, played: Played, *, is_cancelled: bool) -> None:
    task = asyncio.ensure_future(_awaited(app.run(played.text)))
    try:
        if is_cancelled:
            while not stage.brain.of(played.tag) and not task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            task.cancel()
        await task
    finally:
        await asyncio.sleep(0.02)  # what was cancelled gets a turn to say so
        await _close([app], played)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def run_sync(app: App, played: Played) -> Any:
    """The app's synchronous way."""
    if app.run_sync is not None:
        return app.run_sync(played.text)

    async def work() -> Any:
        try:
            return await app.run(played.text)
        finally:
            await _close([app], played)

    return asyncio.run(work())


async def _close(apps: Sequence[App], played: Played) -> None:
    """Leave no connection of this loop open."""
    await wire.aclose()
    for app in apps:
        if app.close is not None and not played.through_gateway:
            await app.close()


def _settle(stage: Stage, played: Played) -> None:
    """The gateway writes of a call that the app left when it has noticed it."""
    if not played.through_gateway:
        return
    name, until = played.scope.attempt_id, time.monotonic() + 5
    asked = len(stage.brain.of(played.tag))
    while time.monotonic() < until:
        spans = stage.wait(stage.store.spans([name]))[name]
        if len({span.attributes[c.CALL_ID] for span in spans}) >= min(asked, 1) and all(
            request.request_id in {*stage.engine.finished, *stage.engine.cancelled}
            for request in stage.engine.requests
        ):
            return
        time.sleep(0.01)


# --- reading what was recorded --------------------------------------------------------------
def tree(spans: Sequence[Span], *, ordered: bool = True) -> list[str]:
    """Every span, indented by depth: name, path, and the status where it is not ok."""
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans), "two spans of one id"
    orphans = [span.name for span in spans if span.parent_id not in {*ids, ROOT_ID}]
    assert orphans == [], "spans without a parent"
    lines = _lines(spans, ROOT_ID, 0, is_ordered=ordered)
    assert len(lines) == len(spans), "a cycle"
    return lines


def _lines(spans: Sequence[Span], parent: str, depth: int, *, is_ordered: bool) -> list[str]:
    children = sorted(
        (span for span in spans if span.parent_id == parent),
        key=lambda span: (span.start_ns, span.sequence_start or 0, span.name),
    )
    blocks = [
        [_line(span, depth), *_lines(spans, span.span_id, depth + 1, is_ordered=is_ordered)]
        for span in children
    ]
    return [line for block in (blocks if is_ordered else sorted(blocks)) for line in block]


def _line(span: Span, depth: int) -> str:
    name = "chat" if span.kind is SpanKind.LLM else span.name
    status = "" if span.status is SpanStatus.OK else f" {span.status}"
    return f"{'  ' * depth}{name} @{path_of(span)}{status}"


def ordered(lines: Sequence[str], is_ordered: bool) -> list[str]:
    """The expected lines, siblings sorted as `tree` sorts what has no order."""
    blocks: list[list[str]] = []
    margin = min((_indent(line) for line in lines), default=0)
    for line in lines:
        if _indent(line) == margin:
            blocks.append([line[margin:]])
        else:
            blocks[-1].append(line[margin:])
    sorted_blocks = [[block[0], *_deeper(block[1:], is_ordered)] for block in blocks]
    return [line for b in (sorted_blocks if is_ordered else sorted(sorted_blocks)) for line in b]


def _deeper(lines: Sequence[str], is_ordered: bool) -> list[str]:
    return [f"  {line}" for line in ordered(lines, is_ordered)] if lines else []


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _without_call_status(lines: Sequence[str]) -> list[str]:
    return [re.sub(r"^( *chat @\S+).*", r"\1", line) for line in lines]


def _inside(outer: str, lines: str) -> str:
    """The expected tree, all of it inside an agent `outer`."""
    moved = re.sub(rf"@{c.UNNAMED_AGENT}\b", f"@{outer}", textwrap.dedent(lines).strip("\n"))
    moved = re.sub(rf"@(?!{outer}( |$))", f"@{outer}/", moved, flags=re.MULTILINE)
    return f"invoke_agent {outer} @{outer}\n{textwrap.indent(moved, '  ')}"


def path_of(span: Span) -> str:
    """The agent path that a span shows."""
    return str(span.attributes[c.AGENT_PATH])


def _calls(lines: str) -> list[str]:
    """The path of every model call of an expected tree."""
    return re.findall(r"^ *chat @(\S+)", lines, re.MULTILINE)


def _calling(lines: str) -> set[str]:
    return set(_calls(lines))


def llm_spans(played: Played) -> list[Span]:
    """The model calls."""
    return [span for span in played.spans if span.kind is SpanKind.LLM]


def check_names(played: Played, app: App) -> None:
    """Every call is under the name of the agent that its prompt shows, and in its own attempt."""
    for span in llm_spans(played):
        prompt = str(span.attributes[c.INPUT_MESSAGES])
        assert set(re.findall(r"task-\d+", prompt)) == {played.tag}
        assert _is_named(span, app), f"{path_of(span)} asked {prompt}"


def _is_named(span: Span, app: App) -> bool:
    who = Part({}, app.marks).who(str(span.attributes[c.INPUT_MESSAGES])) or ""
    return agent_name(path_of(span)) == app.names.get(who, who)


def check_attributes(played: Played) -> None:
    """Ids of the attempt on every span, and the attributes of agents and tools, all of them."""
    scope = played.scope
    by_id = {span.span_id: span for span in played.spans}
    for span in played.spans:
        ids = (span.rollout_id, span.attempt_id, span.trace_id)
        assert ids == (scope.rollout_id, scope.attempt_id, scope.trace_id)
        assert span.start_ns <= span.end_ns
        if span.kind is SpanKind.AGENT:
            assert _plain(span) == _agent_attributes(span, by_id)
        if span.kind is SpanKind.TOOL:
            _check_tool(span)


_ERRORS: Final = (c.ERROR_TYPE, c.EXCEPTION_TYPE, c.EXCEPTION_MESSAGE, c.EXCEPTION_STACKTRACE)


def _plain(span: Span) -> dict[str, Any]:
    has_failed = span.status is SpanStatus.ERROR
    assert (c.ERROR_TYPE in span.attributes) is has_failed, span.name
    return {key: value for key, value in span.attributes.items() if key not in _ERRORS}


def _agent_attributes(span: Span, by_id: Mapping[str, Span]) -> dict[str, Any]:
    names = split_path(path_of(span))
    attributes = {
        c.OPERATION_NAME: "invoke_agent",
        c.AGENT_NAME: names[-1],
        c.AGENT_PATH: path_of(span),
        c.OPENINFERENCE_KIND: "AGENT",
        c.OPENINFERENCE_AGENT: names[-1],
        c.OPENINFERENCE_NODE: names[-1],
    }
    assert span.name == f"invoke_agent {names[-1]}"
    if len(names) > 1:
        attributes[c.OPENINFERENCE_PARENT] = names[-2]
    return attributes


def _check_tool(span: Span) -> None:
    attributes = _plain(span)
    name = span.name.removeprefix("execute_tool ")
    fixed = {
        c.OPERATION_NAME: "execute_tool",
        c.TOOL_NAME: name,
        c.AGENT_PATH: path_of(span),
        c.OPENINFERENCE_KIND: "TOOL",
    }
    assert {key: attributes[key] for key in fixed} == fixed
    assert attributes.keys() - fixed.keys() <= {
        c.TOOL_CALL_ID,
        c.TOOL_CALL_ARGUMENTS,
        c.TOOL_CALL_RESULT,
    }
    arguments = json.loads(str(attributes[c.TOOL_CALL_ARGUMENTS]))
    if name in _TOOLS and span.status is SpanStatus.OK:
        assert arguments == {"what": "seven"}
        assert _TOOLS[name] in str(attributes[c.TOOL_CALL_RESULT])


_TOOLS: Final = {"look": "seven: 7", "count": "5 letters"}


def check_calls(played: Played, stage: Stage) -> None:
    """As many calls are recorded as the model was asked, SDK retries being one call."""
    asked = [asked for asked in stage.brain.of(played.tag) if asked.turn.status < 500]
    assert len(llm_spans(played)) == len(asked)
    call_ids = [span.attributes[c.CALL_ID] for span in llm_spans(played)]
    assert len(set(call_ids)) == len(call_ids)


def check_bypassing(played: Played, stage: Stage) -> None:
    """Recorded as structure; the coverage says that there are no tokens to train."""
    from lightspan.lightning import Rejection, build_episode, cover

    assert stage.brain.of(played.tag) == []
    assert played.records == []
    ended = Attempt(
        rollout_id=played.scope.rollout_id,
        attempt_id=played.scope.attempt_id,
        number=1,
        epoch=1,
        status=AttemptStatus.SUCCEEDED,
    )
    rollout = Rollout(rollout_id=played.scope.rollout_id, task={}, task_id="t")
    coverage = cover(build_episode(ended, rollout, played.spans, []), POLICY)
    assert [entry.rejection for entry in coverage.entries] == [
        Rejection.NO_TOKENS for _ in llm_spans(played)
    ]
    for span in llm_spans(played):
        assert span.attributes[c.ROUTE] == Route.APP
        assert BYPASSED in str(span.attributes[c.OUTPUT_MESSAGES])


def check_tokens(played: Played, stage: Stage) -> None:
    """Token for token what the engine was asked and said, joined to its span and its agent."""
    spans = {span.span_id: span for span in llm_spans(played)}
    complete = [record for record in played.records if record.response_ids]
    recorded = [(record.prompt_ids, record.response_ids) for record in complete]
    assert sorted(recorded) == sorted(_said(played, stage))
    for record in complete:
        assert record.logprobs == stage.engine.logprobs(record.response_ids)
        assert record.versions == [(1, len(record.response_ids))]
        span = spans[record.span_id]
        assert record.agent_path == path_of(span)
        assert record.call_id == span.attributes[c.CALL_ID]


def _said(played: Played, stage: Stage) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of what the gateway answered in full."""
    asked = [asked for asked in stage.brain.of(played.tag) if asked.turn.status == 200]
    complete = sum(bool(record.response_ids) for record in played.records)
    return [
        (asked.prompt_ids, stage.engine.ids(sampled_text(asked.turn)))
        for asked in asked
        if not asked.turn.delay_s or complete == len(llm_spans(played))
    ]


def changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What does not hold the very same object (or an equal list or number) in both snapshots."""
    known = {key for key, value in first.items() if _same(value, second.get(key, Impossible))}
    return sorted((first.keys() | second.keys()) - known)


def assert_unchanged(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Fail with the names of what is not what it was."""
    found = changed(first, second)
    assert found == [], f"no longer what it was: {', '.join(found)}"


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(
            a is b or a == b for a, b in zip(first, second, strict=True)
        )
    return isinstance(first, int | str | bool | float | type(None)) and first == second


# --- the other process ----------------------------------------------------------------------
_CHILD: Final = "from lightspan.testing.adapter_suite import child; child()"


def _scope_as_json(played: Played) -> dict[str, str | None]:
    scope = played.scope
    return {
        "text": played.text,
        "rollout_id": scope.rollout_id,
        "attempt_id": scope.attempt_id,
        "gateway_url": scope.gateway_url,
        "call_token": scope.call_token,
        "trace_id": scope.trace_id,
    }


def child() -> None:
    """Another process: build the app, then instrument, then run two attempts."""
    told = json.load(sys.stdin)
    spec = importlib.util.spec_from_file_location("adapter_under_test", told["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    suite = getattr(module, told["suite"])()
    app = suite.build(told["scenario"], Model(base_url=told["url"]))
    suite.adapter.instrument()

    async def attempts() -> None:
        for fields in told["scopes"]:
            text = fields.pop("text")
            scope = Scope(**fields, routing=POLICY, root_span_id=ROOT_ID)
            with open_scope(scope):
                await app.run(text)
            assert scope.recorder.damages() == []
            print("spans:" + encode_spans(scope.recorder.drain()).hex())
        await wire.aclose()

    asyncio.run(attempts())
    suite.check_telemetry(told["telemetry"])


__all__ = [
    "BYPASSED",
    "IMPOSSIBLE",
    "SCENARIOS",
    "AdapterSuite",
    "App",
    "Impossible",
    "Model",
    "Scenario",
    "Tally",
    "Turn",
    "broken",
    "count",
    "instructions",
    "look",
    "tree",
]
