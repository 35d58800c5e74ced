"""Test which spans a training exports to a backend, and its messages about lost spans."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightspan import LightningRL, Trainer
from lightspan.capture import sdk_instrumentation
from lightspan.lightning.episode import Episode, build_episode
from lightspan.progress import SilentReporter
from lightspan.schema import semconv as c
from lightspan.schema.spans import Span, SpanKind
from lightspan.stores import open_store
from lightspan.training.folder import RunFolder
from lightspan.training.session import Session
from lightspan_otel import attribute_names as a, span_exporter as module, training_export
from lightspan_otel.span_exporter import ExportHandle
from lightspan_otel.training_export import TrainingExport
from lightspan_testing.strategies import make_attempt, make_rollout, make_span
from packages.otel.tests.backend import Backend

pytestmark = pytest.mark.slow


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> Iterator[None]:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LIGHTSPAN_OTLP", backend.url)
    yield
    backend.held.set()
    sdk_instrumentation.uninstall()
    module._close()
    module._State.by_environment = None


def sending() -> ExportHandle:
    found = module.current()
    assert found is not None
    return found


def trained(folder: Path, tiny: Path, apps: Any, reporter: SilentReporter, **options: Any) -> None:
    settings: dict[str, Any] = {"frozen": "base", "group_size": 4, "tasks_per_step": 2, **options}
    algorithm = LightningRL(tiny, optimize="writer", **settings)
    trainer = Trainer(algorithm, steps=1, folder=folder, reporter=reporter)
    trainer.fit(apps.two, [{"q": "a"}, {"q": "b"}])


def in_store(folder: Path) -> list[Span]:
    """Return the spans of all attempts."""

    async def read() -> list[Span]:
        async with open_store(f"sqlite:{folder / 'store.db'}") as store:
            states = await store.rollouts()
            attempts = await store.attempts([state.rollout.rollout_id for state in states])
            found = await store.spans([attempt.attempt_id for attempt in attempts])
            return [span for spans in found.values() for span in spans]

    return asyncio.run(read())


def ids(spans: list[Span]) -> list[tuple[str, str]]:
    return sorted((span.attempt_id, span.span_id) for span in spans)


def test_a_training_is_sent_with_rewards_advantages_and_agents(
    backend: Backend, tmp_path: Path, tiny: Path, apps: Any
) -> None:
    backend.pause_s = 0.1
    trained(tmp_path / "desk", tiny, apps, SilentReporter())
    assert sending().lost == 0
    assert sending().pending == 0  # the end of the training has waited for it
    spans = backend.spans()
    assert ids(spans) == ids(in_store(tmp_path / "desk"))
    assert len({span.attempt_id for span in spans}) == 8
    assert {span.resource["service.name"] for span in spans} == {"desk"}
    assert {span.attributes[a.STEP] for span in spans} == {1}
    known = {(span.attempt_id, span.span_id) for span in spans}
    outermost = [span for span in spans if (span.attempt_id, span.parent_id) not in known]
    paid = {span.attempt_id for span in outermost if a.EPISODE_REWARD in span.attributes}
    assert len(paid) == 8
    calls = [span for span in spans if span.kind is SpanKind.LLM]
    told = {str(span.attributes[c.AGENT_PATH]): a.ADVANTAGE in span.attributes for span in calls}
    assert told["writer"] is True
    assert [path for path, is_told in told.items() if is_told] == ["writer"]


def test_calls_of_skipped_minibatches_are_sent_without_an_advantage(
    backend: Backend, tmp_path: Path, tiny: Path, apps: Any
) -> None:
    options = {"minibatches": 8, "target_kl": 1e-12}
    trained(tmp_path / "desk", tiny, apps, SilentReporter(), **options)
    [line] = RunFolder(tmp_path / "desk").metrics()
    annotated = [span for span in backend.spans() if a.ADVANTAGE in span.attributes]
    assert line["learner/kl_skipped"] > 0
    assert len(annotated) == line["calls/trained"]


def test_a_step_that_is_interrupted_is_sent_too(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path, apps: Any
) -> None:
    """Check a step whose rollouts have ended and are not trained yet."""

    def interrupted(session: Session, explanations: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Session, "explain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "desk", tiny, apps, SilentReporter())
    assert sending().flush()
    spans = backend.spans()
    assert ids(spans) == ids(in_store(tmp_path / "desk"))
    assert not any(a.ADVANTAGE in span.attributes for span in spans)
    assert sum(a.EPISODE_REWARD in span.attributes for span in spans) == 8


# --- by itself --------------------------------------------------------------------------------
def episodes(count: int, spans: int) -> list[Episode]:
    """Return episodes with one attempt each, which have `spans` spans."""
    found = []
    for number in range(count):
        name = str(number)
        made = [
            make_span(
                f"{number * 1_000 + place:016x}",
                attempt=name,
                trace_id=f"{number + 1:032x}",
                start_ns=place,
                end_ns=place,
            )
            for place in range(1, spans + 1)
        ]
        found.append(build_episode(make_attempt(name), make_rollout(name), made, []))
    return found


def test_what_does_not_get_through_is_told_at_the_end(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check spans that find no room in the queue, and spans that the backend refuses."""
    monkeypatch.setattr(module, "MAX_QUEUE_SIZE", 300)
    monkeypatch.setattr(training_export, "EXPORT_TIMEOUT_S", 0.2)
    backend.held.clear()
    messages: list[str] = []

    async def run() -> None:
        export = TrainingExport("desk", messages.append)
        export.add(episodes(5, 100), 3, is_learned=True)
        export.send()
        await export.close(is_patient=True)

    asyncio.run(run())
    place = f"{backend.url}/v1/traces"
    assert messages == [f"500 spans did not get to {place}; the store keeps them"]


def test_to_stop_the_wait_ends_it(backend: Backend) -> None:
    backend.held.clear()

    async def run() -> str:
        export = TrainingExport("desk", lambda text: None)
        export.add(episodes(3, 10), 1, is_learned=False)
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_later(0.2, task.cancel)
        await export.close(is_patient=True)
        return "the result"

    assert asyncio.run(run()) == "the result"
