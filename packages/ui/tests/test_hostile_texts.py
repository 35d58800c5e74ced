"""Texts of models, apps and users that try to break out of an answer stay texts in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

import lightspan_ui.views as v
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Mode, Outcome, Report
from lightspan.schema.resources import ROUTING
from lightspan.schema.reward import Reward
from lightspan.schema.routing import make_routing
from lightspan.schema.spans import SpanEvent, SpanKind, SpanStatus
from lightspan.stores import open_store
from lightspan.stores.protocol import StoredCall
from lightspan_testing.store_suite.base import (
    LEASE_S,
    make_production,
    make_record,
    make_rollout,
    make_span,
)
from lightspan_ui.filters import Filters
from lightspan_ui.server import PREFIX
from packages.ui.tests.recorded import RUN_ID, call_span, make_run, record
from packages.ui.tests.ui_client import Answer, Client, serving

MARKUP: Final = "<script>alert(1)</script></title>\"'><img src=x onerror=alert(1)>"
URL: Final = "javascript:alert(document.domain)//"
BIDI: Final = "safe \u202egnp.exe\u202c \u2066x\u2069 \u200b\ufeff"
CONTROLS: Final = "a\x00b\x1b[2J\r\nSet-Cookie: x=1\u2028\u2029"
PATH: Final = "../../etc/passwd?x=1#y&z=%2e%2e"
TEXTS: Final = (MARKUP, URL, BIDI, CONTROLS, PATH)
HALF: Final = "half \ud83d of a letter"
"""A text with a lone surrogate. A store holds none, but JSON within its texts may."""


async def record_hostile(url: str, text: str) -> None:
    """Record an attempt of production in which everything that has a name or a text is `text`."""
    tools = [{"id": text, "type": "function", "function": {"name": text, "arguments": text}}]
    half = [{"role": "assistant", "parts": [{"type": "text", "content": HALF}]}]
    more = {"user.id": text, "session.id": text, "tag.tags": json.dumps([text, HALF]), text: text}
    attempt = make_production("ro-2").attempt
    tool = make_span(
        attempt,
        50,
        name=text,
        kind=SpanKind.TOOL,
        attributes={c.TOOL_CALL_ARGUMENTS: text, c.TOOL_CALL_RESULT: text},
        status=SpanStatus.ERROR,
        status_message=text,
        events=[SpanEvent(name=text, time_ns=1, attributes={text: text})],
    )
    ids = {c.CALL_ID: text, c.AGENT_PATH: text, c.RESPONSE_ID: text, c.CALL_OUTCOME: "ok"}
    messages = dict.fromkeys((c.INPUT_MESSAGES, c.OUTPUT_MESSAGES), json.dumps(half))
    call = call_span(attempt, 60, text, text, text).replace(attributes={**ids, **messages})
    options: dict[str, Any] = {"question": text, "answer": text, "service": text, "fails": text}
    async with open_store(url) as store:
        await record(store, "ro-1", tools=tools, more=more, **options)
        await record(store, "ro-2", spans=[tool, call])


async def train_hostile(path: Path, text: str) -> None:
    """Record a run with a rollout whose task, ids, agent, error and dimensions are `text`."""
    folder = await make_run(path, steps=1)
    async with open_store(folder.store_url) as store:
        resources = await store.put_resources(
            {ROUTING: make_routing({text: "main"}, None, "main", None)}
        )
        rollout = make_rollout(
            "ro-hostile",
            task={"question": text, text: [text]},
            task_id=text,
            run_id=RUN_ID,
            group_id=text,
            step=2,
            mode=Mode.TRAIN,
            resources_id=resources,
        )
        await store.enqueue([rollout])
        [claim] = await store.claim("runner", 1, LEASE_S, RUN_ID)
        attempt = claim.attempt
        span = call_span(attempt, 0, text, text, text)
        fields = {"policy": "main", "agent_path": text, "sequence_start": 0, "sequence_end": 1}
        records = [make_record(attempt, str(span.attributes[c.CALL_ID]), **fields)]
        await store.add_calls([StoredCall(span=span, records=records, epoch=attempt.epoch)])
        reward = Reward(0.5, {text: 0.5})
        await store.report(
            [
                Report(
                    attempt_id=attempt.attempt_id,
                    epoch=attempt.epoch,
                    status=AttemptStatus.FAILED,
                    outcome=Outcome.APP_ERROR,
                    message=text,
                    reward=reward,
                )
            ]
        )


def strict(answer: Answer) -> Any:
    """Return the JSON of an answer that no program can take for anything but JSON."""
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    value = json.loads(answer.body.decode())
    json.dumps(value, ensure_ascii=False).encode()  # no half of a letter, escaped either
    return value


async def all_answers(client: Client, place: str) -> dict[str, Answer]:
    """Read every path of a place, those with ids too."""
    paths = [f"{place}/{name}" for name in ("rollouts", "facets", "groups", "export")]
    if place.startswith("/runs"):
        paths += [place, f"{place}/metrics", f"{place}/prompts", f"/compare?run={place[6:]}"]
    page = await client.get(f"{place}/rollouts", v.RolloutPage)
    for row in page.rows:
        path = f"{place}/rollouts/{quote(row.rollout_id, safe='')}"
        detail = await client.get(path, v.RolloutDetail)
        paths += [path, f"{place}/groups/{quote(row.group, safe='')}?step={row.step}"]
        paths += [f"{path}/calls/{quote(call.call_id, safe='')}" for call in detail.calls]
        paths += [f"{path}/spans/{quote(span.span_id, safe='')}" for span in detail.spans]
    return {path: await client.send(PREFIX + path) for path in ("/places", *paths)}


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts and names in JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from texts_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)


@pytest.mark.parametrize("text", TEXTS)
async def test_hostile_texts_of_production_stay_texts(text: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    await record_hostile(url, text)
    async with serving(url, write=True) as client:
        rating = {"id": "at-ro-1", "reward": 1.0, "comment": text}
        path = f"{PREFIX}/stores/app/feedback"
        assert (await client.send(path, method="POST", body=rating)).status == 200
        answers = await all_answers(client, "/stores/app")
        assert {
            path: answer.status for path, answer in answers.items() if answer.status != 200
        } == {}
        found = {name: list(texts_in(strict(answer))) for name, answer in answers.items()}
        detail = answers["/stores/app/rollouts/ro-1"].read(v.RolloutDetail)
        assert detail.row.message == text
        assert [each.comment for each in detail.ratings] == [text.strip()]
        other = answers["/stores/app/rollouts/ro-2"].read(v.RolloutDetail)
        tool = next(span for span in other.spans if span.name == text)
        assert (tool.arguments, tool.result, tool.message) == (text, text, text)
        call = next(span for span in other.spans if span.call_id == text)
        assert call.agent == text
        assert [message.text for message in call.output] == ["half \ufffd of a letter"]
        assert text in found["/stores/app/facets"]
        assert any(f"{text}({text})" in each for each in found["/stores/app/rollouts"])


@pytest.mark.parametrize("text", TEXTS)
async def test_hostile_texts_of_a_run_stay_texts(text: str, tmp_path: Path) -> None:
    await train_hostile(tmp_path / "run", text)
    async with serving(tmp_path / "run") as client:
        answers = await all_answers(client, "/runs/run")
        assert {
            path: answer.status for path, answer in answers.items() if answer.status != 200
        } == {}
        for answer in answers.values():
            strict(answer)
        [group] = (await client.get("/runs/run/groups", v.GroupPage, step=2)).groups
        assert (group.group, group.task) == (text, text)
        detail = await client.get("/runs/run/rollouts/ro-hostile", v.RolloutDetail)
        assert detail.row.dimensions == {text: 0.5}
        assert (detail.row.task, detail.row.message, detail.row.agents) == (text, text, {text: 1})
        page = await client.get("/runs/run/rollouts", v.RolloutPage, agent=text)
        assert page.total == 1
        page = await client.get("/runs/run/rollouts", v.RolloutPage, task=text, group=text)
        assert [row.rollout_id for row in page.rows] == ["ro-hostile"]


RAW: Final = (*(quote(text, safe="") for text in TEXTS), "%ED%A0%BD", "%FF%FE", "%00", "~" * 3_000)
"""Texts in addresses, also such as no browser sends."""


@pytest.mark.parametrize("raw", RAW)
async def test_hostile_addresses_are_answered(raw: str, tmp_path: Path) -> None:
    await make_run(tmp_path / "run", steps=1)
    names: Sequence[str] = (*Filters.__struct_fields__, "sort", "limit", "cursor")
    paths = [f"/runs/run/{page}?{name}={raw}" for page in ("rollouts", "groups") for name in names]
    paths += [f"/runs/run/facets?text={raw}", f"/runs/run/export?service={raw}"]
    paths += [f"/runs/run/metrics?names={raw}&kind={raw}", f"/runs/run/metrics?points={raw}"]
    paths += [f"/compare?run={raw}", f"/runs/{raw}", f"/stores/{raw}/rollouts"]
    paths += [f"/runs/run/rollouts/{raw}", f"/runs/run/groups/{raw}?step={raw}"]
    paths += [f"/runs/run/rollouts/ro-1-0/{kind}/{raw}" for kind in ("spans", "calls")]
    async with serving(tmp_path / "run") as client:
        for path in paths:
            answer = await client.send(PREFIX + path)
            assert answer.status in (200, 400, 404), (path, answer)
            strict(answer)


@pytest.mark.parametrize(
    "body",
    [
        b'{"id": "at-ro-1", "reward": 1.0, "comment": "\\ud83d"}',
        b'{"id": "\\udc00", "reward": 1.0}',
        b'{"id": "at-ro-1", "reward": 1.0, "comment": "\xff"}',
        b'{"id": "at-ro-1", "reward": 1e999}',
        b'{"id": "at-ro-1", "reward": NaN}',
        b'{"id": "../at-ro-1\\u0000", "reward": 1.0}',
        b"[" * 30_000,
    ],
)
async def test_hostile_ratings_are_refused_or_taken(body: bytes, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    async with open_store(url) as store:
        await record(store, "ro-1")
    async with serving(url, write=True) as client:
        path = f"{PREFIX}/stores/app/feedback"
        headers = {"Content_Type": "application/json"}
        answer = await client.send(path, method="POST", body=body, **headers)
        assert answer.status in (200, 400, 404), answer
        strict(answer)
        strict(await client.send(f"{PREFIX}/stores/app/rollouts/ro-1"))
