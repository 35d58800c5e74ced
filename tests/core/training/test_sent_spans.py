"""What a training sends to a backend: all of it, however slow that is, or what is said of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.core.production.backend import Backend

from lightspan import LightningRL, Trainer
from lightspan.capture import wire
from lightspan.lightning.episode import Episode, build_episode
from lightspan.production import outlet as module
from lightspan.production.outlet import Outlet
from lightspan.progress import SilentReporter
from lightspan.schema import conventions as c
from lightspan.schema.records import Attempt, AttemptStatus, Rollout
from lightspan.schema.spans import Span, SpanKind
from lightspan.stores import open_store
from lightspan.training import outgoing
from lightspan.training.outgoing import Outgoing
from lightspan.training.session import Session


class Lines(SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


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
    monkeypatch.setattr(module, "PAUSES_S", (0.0,) * 5)
    yield
    backend.held.set()
    wire.uninstall()
    module._close()
    module._State.by_environment = None


def sending() -> Outlet:
    found = module.current()
    assert found is not None
    return found


def trained(folder: Path, tiny: Path, apps: Any, reporter: SilentReporter) -> None:
    algorithm = LightningRL(tiny, optimize="writer", frozen="base", group_size=4, tasks_per_step=2)
    trainer = Trainer(algorithm, steps=1, folder=folder, reporter=reporter)
    trainer.fit(apps.two, [{"q": "a"}, {"q": "b"}])


def in_store(folder: Path) -> list[Span]:
    """Of all attempts."""

    async def read() -> list[Span]:
        async with open_store(f"sqlite:{folder / 'store.db'}") as store:
            states = await store.rollouts()
            attempts = await store.attempts([state.rollout.rollout_id for state in states])
            found = await store.spans([attempt.attempt_id for attempt in attempts])
            return [span for spans in found.values() for span in spans]

    return asyncio.run(read())


def ids(spans: list[Span]) -> list[tuple[str, str]]:
    return sorted((span.attempt_id, span.span_id) for span in spans)


@pytest.mark.parametrize("room", [20_000, 8])
@pytest.mark.parametrize("service", ["", "shop"])
def test_a_training_is_sent_with_rewards_advantages_and_agents(
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny: Path,
    apps: Any,
    room: int,
    service: str,
) -> None:
    """Whole, too, where a step is larger than the queue and the backend is slow."""
    monkeypatch.setattr(module, "MOST_SPANS", room)
    if service:
        monkeypatch.setenv("OTEL_SERVICE_NAME", service)
    backend.pause_s = 0.0 if room > 8 else 0.1
    trained(tmp_path / "desk", tiny, apps, SilentReporter())
    assert sending().lost == 0
    assert sending().unsent == 0  # the end of the training has waited for it
    spans = backend.spans()
    assert ids(spans) == ids(in_store(tmp_path / "desk"))
    assert len({span.attempt_id for span in spans}) == 8
    assert {span.resource["service.name"] for span in spans} == {service or "desk"}
    assert {span.attributes[c.STEP] for span in spans} == {1}
    known = {(span.attempt_id, span.span_id) for span in spans}
    outermost = [span for span in spans if (span.attempt_id, span.parent_id) not in known]
    paid = {span.attempt_id for span in outermost if c.EPISODE_REWARD in span.attributes}
    assert len(paid) == 8
    calls = [span for span in spans if span.kind is SpanKind.LLM]
    told = {str(span.attributes[c.AGENT_PATH]): c.ADVANTAGE in span.attributes for span in calls}
    assert told["writer"] is True
    assert [path for path, is_told in told.items() if is_told] == ["writer"]


@pytest.mark.parametrize("how", ["failed", "stopped"])
def test_a_step_that_is_interrupted_is_sent_too(
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny: Path,
    apps: Any,
    how: str,
) -> None:
    """Its rollouts had ended; nothing was learned of them yet."""

    def interrupted(session: Session, explanations: Any) -> None:
        if how == "failed":
            raise RuntimeError("boom")
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Session, "explain", interrupted)
    expected: Any = RuntimeError if how == "failed" else KeyboardInterrupt
    with pytest.raises(expected):
        trained(tmp_path / "desk", tiny, apps, SilentReporter())
    assert sending().flush()
    spans = backend.spans()
    assert ids(spans) == ids(in_store(tmp_path / "desk"))
    assert not any(c.ADVANTAGE in span.attributes for span in spans)
    assert sum(c.EPISODE_REWARD in span.attributes for span in spans) == 8


# --- by itself --------------------------------------------------------------------------------
def made(number: int, count: int) -> tuple[Rollout, Attempt, list[Span]]:
    """A rollout, its attempt and its spans."""
    rollout = Rollout(rollout_id=f"ro-{number}", task=number, task_id=f"t{number}")
    attempt = Attempt(
        attempt_id=f"at-{number}",
        rollout_id=rollout.rollout_id,
        number=1,
        epoch=1,
        status=AttemptStatus.SUCCEEDED,
    )
    spans = [
        Span(
            span_id=f"{number * 1_000 + place:016x}",
            trace_id=f"{number + 1:032x}",
            name="chat m",
            kind=SpanKind.LLM,
            rollout_id=rollout.rollout_id,
            attempt_id=attempt.attempt_id,
            start_ns=place,
            end_ns=place,
            attributes={c.CALL_ID: f"call-{place}"},
        )
        for place in range(1, count + 1)
    ]
    return rollout, attempt, spans


def episodes(attempts: int, spans: int) -> list[Episode]:
    return [
        build_episode(attempt, rollout, found, [])
        for rollout, attempt, found in (made(number, spans) for number in range(attempts))
    ]


class Kept:
    """A store that has these spans."""

    def __init__(self, found: list[Episode], error: Exception | None = None) -> None:
        self._spans = {episode.attempt_id: list(episode.spans) for episode in found}
        self._error = error

    async def spans(self, attempt_ids: list[str]) -> dict[str, list[Span]]:
        if self._error is not None:
            raise self._error
        return {each: self._spans[each] for each in attempt_ids if each in self._spans}


def stuck(backend: Backend) -> None:
    """It takes a request, and answers none."""
    backend.held.clear()
    module.put([*made(99, 1)[2]])
    while sending()._queue:
        time.sleep(0.01)


def closed(
    found: list[Episode], store: Kept, *, is_patient: bool, begun: int = 0
) -> tuple[Outgoing, list[str]]:
    """What a training of one step does; and what it was told."""
    told: list[str] = []

    async def run() -> Outgoing:
        outgoing = Outgoing("desk", told.append)
        outgoing.open(store)  # type: ignore[arg-type]
        outgoing.begin([made(number, 0)[0] for number in range(len(found) + begun)])
        outgoing.add(found, 3, is_learned=True)
        outgoing.send()
        await outgoing.close(is_patient=is_patient)
        return outgoing

    return asyncio.run(run()), told


def test_an_attempt_larger_than_the_queue_is_sent_in_pieces(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 300)
    found = episodes(3, 900)
    outgoing_, told = closed(found, Kept(found), is_patient=True)
    assert ids(backend.spans()) == ids([span for each in found for span in each.spans])
    assert (sending().sent, sending().lost, outgoing_._size) == (2_700, 0, 0)
    assert told == [f"sending the spans of 2 more rollouts to {sending().place}; Ctrl-C ends that"]


@pytest.mark.parametrize("is_patient", [True, False])
def test_what_a_backend_that_is_stuck_does_not_get_is_said(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, is_patient: bool
) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 10)
    monkeypatch.setattr(outgoing, "PATIENCE_S", 0.0)
    stuck(backend)
    found = episodes(5, 10)
    _, told = closed(found, Kept(found), is_patient=is_patient, begun=2)
    left = [line for line in told if "Ctrl-C" not in line]
    assert left == [
        f"the spans of 4 rollouts were not sent to {sending().place}; the store keeps them",
        "2 rollouts had not ended, or were of no step that did: nothing of them is sent to "
        f"{sending().place}; the store keeps what they did",
    ]


@pytest.mark.parametrize("odd", ["gone", "broken", "too many"])
def test_what_cannot_be_kept_or_read_again_is_said(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 10)
    if odd == "too many":
        monkeypatch.setattr(outgoing, "MOST_NOTED", 2)
    backend.pause_s = 0.05
    found = episodes(5, 10)
    error = RuntimeError("boom") if odd == "broken" else None
    store = Kept(found[:4] if odd == "gone" else found, error)
    _, told = closed(found, store, is_patient=True)
    count = {"gone": "1 rollout", "broken": "4 rollouts", "too many": "2 rollouts"}[odd]
    assert told[-1] == (
        f"the spans of {count} were not sent to {sending().place}; the store keeps them"
    )
    if odd == "broken":
        assert "spans that are to be sent cannot be read again: boom" in told


def test_to_stop_the_wait_ends_it(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 10)
    stuck(backend)
    found = episodes(3, 10)
    told: list[str] = []

    async def run() -> str:
        outgoing_ = Outgoing("desk", told.append)
        outgoing_.open(Kept(found))  # type: ignore[arg-type]
        outgoing_.add(found, 1, is_learned=False)
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_later(0.2, task.cancel)
        await outgoing_.close(is_patient=True)
        return "the result"

    assert asyncio.run(run()) == "the result"
    assert told[-1].startswith("the spans of 2 rollouts were not sent")
