"""Test the web page of attempts whose spans another program sent."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import lightspan_ui.views as v
from lightspan.algorithms.recorded_attempts import Query, read_attempts
from lightspan.cli import main
from lightspan.stores import open_store
from packages.otel.tests.trace_files import LANGFUSE, OTLP, PHOENIX, otlp_line
from packages.ui.tests.ui_client import serving


@pytest.mark.parametrize("kind", ["otlp", "phoenix", "langfuse"])
async def test_imported_attempts_have_their_agents_tasks_and_links(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIGHTSPAN_STORE", raising=False)
    monkeypatch.setenv("LIGHTSPAN_OTLP", "http://127.0.0.1:6006/v1/traces")
    texts = {
        "otlp": "\n".join(map(otlp_line, OTLP)),
        "phoenix": "\n".join(map(json.dumps, PHOENIX)),
        "langfuse": json.dumps(LANGFUSE),
    }
    file = tmp_path / "traces.jsonl"
    file.write_text(texts[kind])
    url = f"sqlite:{tmp_path / 'app.db'}"
    assert _import(file, url) in (0, 1)  # scores of Langfuse are left out
    async with open_store(url) as store:
        expected = {r.attempt.attempt_id: r async for r in read_attempts(store, Query())}
    assert expected
    async with serving(url) as client:
        page = await client.get("/stores/app/rollouts", v.RolloutPage)
        assert {row.attempt_id for row in page.rows} == expected.keys()
        for row in page.rows:
            recorded = expected[row.attempt_id]
            agents = [call.agent_path for call in recorded.episode.calls]
            assert row.agents == {agent: agents.count(agent) for agent in agents}
            assert row.reward == recorded.score
            assert row.task
            detail = await client.get(f"/stores/app/rollouts/{row.rollout_id}", v.RolloutDetail)
            assert json.dumps(recorded.state.rollout.task)[:20] in (detail.task, detail.task[:20])
            assert {call.agent for call in detail.calls} == set(agents)
            assert {span.agent for span in detail.spans if span.call_id} == set(agents)
            assert detail.links[0].url.endswith(f"/redirects/traces/{detail.trace_id}")
            assert any("OpenTelemetry" in note for note in detail.notes)


def _import(file: Path, url: str) -> int:
    statuses: list[int] = []  # the command runs an event loop of its own
    thread = threading.Thread(
        target=lambda: statuses.append(main(["import", str(file), "--store", url]))
    )
    thread.start()
    thread.join()
    return statuses[0]
