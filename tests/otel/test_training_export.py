"""Test which spans a training exports to a backend, and its messages about lost spans."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightspan import LightningRL, Trainer
from lightspan.capture import sdk_instrumentation
from lightspan.errors import StoreError
from lightspan.lightning.episode import Episode, build_episode
from lightspan.progress import SilentReporter
from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan.schema.media import reference
from lightspan.schema.spans import Span, SpanKind
from lightspan.stores import open_store
from lightspan.training.folder import RunFolder
from lightspan.training.session import Session
from lightspan_otel import attribute_names as a, span_exporter as module, training_export
from lightspan_otel.normalize import normalized_arrival
from lightspan_otel.otlp import decode_request
from lightspan_otel.span_exporter import ExportHandle
from lightspan_otel.training_export import TrainingExport
from lightspan_testing.strategies import make_attempt, make_rollout, make_span
from lightspan_testing.tiny_vision import image_part, picture
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


async def no_images(digests: Sequence[str]) -> dict[str, Image]:
    return {}


def with_image() -> tuple[Image, Episode]:
    """Return an image, and an episode with a call whose prompt refers to it."""
    image = Image.of(picture(), "image/png")
    part = reference(image_part(image.data))
    messages = [{"role": "user", "parts": [part]}]
    span = make_span(
        "0" * 15 + "1",
        SpanKind.LLM,
        attempt="a",
        trace_id=f"{1:032x}",
        attributes={c.INPUT_MESSAGES: json.dumps(messages, separators=(",", ":"))},
    )
    return image, build_episode(make_attempt("a"), make_rollout("a"), [span], [])


@pytest.mark.parametrize("is_learned", [True, False])
@pytest.mark.parametrize("switch", ["1", "0"])
def test_images_of_the_store_are_sent_if_asked_for(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, switch: str, is_learned: bool
) -> None:
    """Check that an import of the sent trace gives the image, and else only its digest."""
    monkeypatch.setenv("LIGHTSPAN_OTLP_IMAGES", switch)
    image, episode = with_image()
    asked: list[Sequence[str]] = []

    async def run() -> None:
        async def read(digests: Sequence[str]) -> dict[str, Image]:
            asked.append(digests)
            return {image.digest: image}

        export = TrainingExport("desk", lambda text: None, read)
        await export.add([episode], 1, is_learned=is_learned)
        await export.close(is_patient=True)

    asyncio.run(run())
    [(headers, body)] = backend.requests
    [arrival] = map(normalized_arrival, decode_request(body, headers["content-type"]).arrivals)
    assert arrival.images == ((image,) if switch == "1" else ())
    assert (
        arrival.span.attributes[c.INPUT_MESSAGES] == episode.spans[0].attributes[c.INPUT_MESSAGES]
    )
    assert asked == ([[image.digest]] if switch == "1" else [])


def test_a_store_that_cannot_be_read_costs_the_images_only(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIGHTSPAN_OTLP_IMAGES", "1")
    _, episode = with_image()

    async def run() -> None:
        async def read(digests: Sequence[str]) -> dict[str, Image]:
            raise StoreError("gone")

        export = TrainingExport("desk", lambda text: None, read)
        await export.add([episode], 1, is_learned=True)
        await export.close(is_patient=True)

    asyncio.run(run())
    assert len(backend.spans()) == 1
    assert "lightspan: images are not exported: StoreError('gone')" in caplog.text


def test_what_does_not_get_through_is_told_at_the_end(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check spans that find no room in the queue, and spans that the backend refuses."""
    monkeypatch.setattr(module, "MAX_QUEUE_SIZE", 300)
    monkeypatch.setattr(training_export, "EXPORT_TIMEOUT_S", 0.2)
    backend.held.clear()
    messages: list[str] = []

    async def run() -> None:
        export = TrainingExport("desk", messages.append, no_images)
        await export.add(episodes(5, 100), 3, is_learned=True)
        export.send()
        await export.close(is_patient=True)

    asyncio.run(run())
    place = f"{backend.url}/v1/traces"
    assert messages == [f"500 spans did not get to {place}; the store keeps them"]


def test_to_stop_the_wait_ends_it(backend: Backend) -> None:
    backend.held.clear()

    async def run() -> str:
        export = TrainingExport("desk", lambda text: None, no_images)
        await export.add(episodes(3, 10), 1, is_learned=False)
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_later(0.2, task.cancel)
        await export.close(is_patient=True)
        return "the result"

    assert asyncio.run(run()) == "the result"
