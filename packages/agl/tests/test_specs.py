"""Tests of a `Trainer`'s components as classes, dotted names and mappings."""

from __future__ import annotations

from typing import Any

import pytest

import lightspan_agl as agl
from lightspan.errors import UnsupportedError

CONFIG = {"actor_rollout_ref": {"model": {"path": "m"}}}


class Own(agl.Tracer):
    """A tracer of the user's own."""


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (agl.OtelTracer, agl.OtelTracer),
        ("agentlightning.tracer.OtelTracer", agl.OtelTracer),
        ("agentlightning.OtelTracer", agl.OtelTracer),
        ("lightspan_agl.tracer.otel.OtelTracer", agl.OtelTracer),
        ({"type": "agentlightning.tracer.AgentOpsTracer", "daemon": True}, agl.AgentOpsTracer),
        ({"type": Own}, Own),
        (Own(), Own),
        (None, agl.Tracer),
    ],
)
def test_a_tracer(spec: Any, kind: type) -> None:
    assert type(agl.Trainer(tracer=spec).tracer) is kind


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (agl.TracerTraceToTriplet, None),
        ("agentlightning.adapter.TracerTraceToTriplet", None),
        ({"agent_match": "write"}, "write"),
        ({"type": "agentlightning.adapter.TracerTraceToTriplet", "agent_match": "w"}, "w"),
    ],
)
def test_an_adapter(spec: Any, match: str | None) -> None:
    adapter = agl.Trainer(algorithm=agl.VERL(CONFIG), adapter=spec).adapter
    assert isinstance(adapter, agl.TracerTraceToTriplet)
    assert adapter.agent_match == match


def test_a_store() -> None:
    @agl.algo
    def nothing() -> None: ...

    for spec in (
        agl.InMemoryLightningStore,
        "agentlightning.store.InMemoryLightningStore",
        {"type": "agentlightning.store.memory.InMemoryLightningStore", "thread_safe": True},
    ):
        store = agl.Trainer(algorithm=nothing, store=spec).store
        assert isinstance(store, agl.InMemoryLightningStore)
    with pytest.raises(UnsupportedError, match=r"store=3\): use InMemoryLightningStore"):
        agl.Trainer(algorithm=nothing, store=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tracer": "agentlightning.tracer.DummyTracer"}, "'DummyTracer': leave tracer= out"),
        ({"tracer": "nowhere.Tracer"}, r"tracer='nowhere\.Tracer': No module named 'nowhere'"),
        ({"tracer": "Tracer"}, r"tracer='Tracer': Empty module name"),
        ({"tracer": {"daemon": True}}, r"tracer=\{'daemon': True\}: add 'type'"),
        ({"tracer": {"type": agl.OtelTracer, "x": 1}}, r"OtelTracer\(\) takes no arguments"),
        ({"tracer": 3}, r"tracer=3\): use an instance of a subclass of lightspan_agl\.Tracer"),
        ({"adapter": {"agent_macth": "w"}}, "did you mean 'agent_match' for 'agent_macth'"),
        ({"adapter": 3}, r"adapter=3\): use \{'agent_match': 'regular expression'\}"),
        (
            {"adapter": agl.TraceToMessages(), "algorithm": agl.VERL(CONFIG)},
            r"adapter=TraceToMessages\(\)\) with VERL: use \{'agent_match'",
        ),
    ],
)
def test_specs_that_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        agl.Trainer(**options)
