"""Tests of an adapter with a framework that has none and is known by its OpenTelemetry spans.

A test file of an adapter subclasses `SpansNesting`. Each chain of layers is run with the adapter
installed first and last, asynchronous and synchronous, in training and in production. The result is
one attempt with one tree, and the path has the agents in the order of entering.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
from opentelemetry.sdk.trace import TracerProvider

import lightspan_otel as otel
from lightspan_testing.adapter_harness import Stage, Turn
from lightspan_testing.attempts import path_of, tree
from tests.adapters.fixtures import openinference
from tests.adapters.layers import InALoop, Layer, PlainPython, asked, attempt_of, client

PROVIDER = TracerProvider()
"""The app's own tracer provider."""


class Spans(InALoop):
    """An agent of a framework that only emits OpenTelemetry spans.

    It calls its model in its span, and its tool runs the next layer.
    """

    def __init__(self, name: str, url: str, inner: Layer | None) -> None:
        self.names = [name]
        self.url, self.inner = url, inner
        self.tracer = PROVIDER.get_tracer("some.framework")

    async def run(self, text: str) -> Any:
        attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": self.names[0]}
        with self.tracer.start_as_current_span("run", attributes=attributes):
            said = await self._ask(text)
            if self.inner is None:
                return said
            tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "ask"}
            with self.tracer.start_as_current_span("execute_tool ask", attributes=tool):
                found = await self.inner.run(text)
            return await self._ask(f"{text}: {found}")

    async def _ask(self, text: str) -> str:
        answer = await client(self.url).chat.completions.create(**asked(self.names[0], text))
        return str(answer.choices[0].message.content)


Make = Callable[[str, str, Layer | None], Layer]
NAMES = "abc"


class SpansNesting:
    """Tests of an adapter; the module's docstring describes them."""

    adapter: ClassVar[Any]
    """The adapter's module."""
    layers: ClassVar[Sequence[type[Any]]]
    """Agent classes of the adapter's framework."""
    beside: ClassVar[str]
    """OpenInference's instrumentor of the framework, as `module.Class`."""

    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls) -> Iterator[Stage]:
        with Stage() as stage:
            yield stage
            assert stage.brain.problems == []

    @pytest.mark.parametrize("place", ["training", "production"])
    @pytest.mark.parametrize("mode", ["async", "sync"])
    @pytest.mark.parametrize("order", ["adapter first", "adapter last"])
    @pytest.mark.parametrize("chain", ["sx", "xs", "psx", "xsp", "sxs", "xsx"])
    def test_path(
        self, stage: Stage, tmp_path: Path, chain: str, order: str, mode: str, place: str
    ) -> None:
        for kind in self.layers:
            makers: dict[str, Make] = {"s": Spans, "x": kind, "p": PlainPython}
            layer: Layer | None = None
            for letter, name in reversed(list(zip(chain, NAMES, strict=False))):
                layer = makers[letter](name, stage.url, layer)
            assert layer is not None
            self._check(stage, layer, len(chain), order, mode, place, tmp_path)

    def _check(
        self,
        stage: Stage,
        layer: Layer,
        depth: int,
        order: str,
        mode: str,
        place: str,
        folder: Path,
    ) -> None:
        asking = Turn(calls=[("ask", '{"what": "help with {task}"}')])
        says = {name: [asking, f"{name} is done with {{task}}."] for name in NAMES}
        says[NAMES[depth - 1]] = ["All I know of {task}."]
        installs = [self.adapter.instrument, lambda: otel.instrument(PROVIDER)]
        with ExitStack() as stack:
            for install in installs if order == "adapter first" else reversed(installs):
                stack.enter_context(install())
            played = attempt_of(layer, says, stage, mode, place, folder)
        paths = ["/".join(NAMES[: level + 1]) for level in range(depth)]
        assert played.calls == [*paths, *reversed(paths[:-1])], tree(played.spans)
        agents = [path_of(span) for span in played.spans if span.kind == "agent"]
        assert sorted(agents) == sorted(paths)
        assert tree(played.spans)  # no parent is missing

    def test_what_the_adapter_covers_is_told_of_once(self, stage: Stage, tmp_path: Path) -> None:
        """Check that agents are recorded once, although OpenInference also reports them to the
        provider.
        """
        for kind, place in itertools.product(self.layers, ["training", "production"]):
            layer = Spans("a", stage.url, kind("b", stage.url, None))
            with openinference(self.beside, tracer_provider=PROVIDER):
                self._check(stage, layer, 2, "adapter first", "async", place, tmp_path)
