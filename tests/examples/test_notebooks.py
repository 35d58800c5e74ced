"""Execute the notebooks of examples/notebooks from top to bottom."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from lightspan_testing.scripted import Request, ScriptedServer
from tests.reports.ui_numbers import check_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"
RULES = "Bills go to accounts, passwords to support, parcels to shipping. Answer with one word."


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels import modules of their folder, as a user's kernel does."""
    for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


def client_of(name: str, folder: Path) -> NotebookClient:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)  # type: ignore[no-untyped-call]
    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)


def outputs(client: NotebookClient, kind: str) -> list[Any]:
    """Return the outputs of all cells that have data of a MIME type."""
    cells = [cell for cell in client.nb.cells if cell.cell_type == "code"]
    found = [output for cell in cells for output in cell.outputs]
    return [output.data[kind] for output in found if kind in output.get("data", {})]


def printed(client: NotebookClient) -> str:
    cells = [cell for cell in client.nb.cells if cell.cell_type == "code"]
    return "".join(o.text for cell in cells for o in cell.outputs if o.output_type == "stream")


def test_an_agent_learns(tmp_path: Path) -> None:
    """Check the gain, the learning curve in the notebook, and that the bar was removed."""
    client = client_of("first_agent.ipynb", tmp_path)
    client.execute()
    gain = re.search(r"held-out reward: \S+ -> \S+ \(.*CI of the gain (\S+?)\.\.", printed(client))
    assert gain is not None, printed(client)
    assert float(gain[1]) > 0.2
    assert len(outputs(client, "image/png")) == 1
    assert {str(each) for each in outputs(client, "text/html")} == {""}
    assert "lowest" not in printed(client)
    asyncio.run(check_run(tmp_path / "runs/newsroom"))


def test_an_interrupt_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    client = client_of("first_agent.ipynb", tmp_path)
    [fit] = [cell for cell in client.nb.cells if "trainer.fit" in cell.source]
    plain, process = fit.source, tmp_path / "process"
    fit.source = f"import os; open('process', 'w').write(str(os.getpid()))\n{plain}"
    metrics = tmp_path / "runs/newsroom/metrics.jsonl"

    def interrupt() -> None:
        while not metrics.exists() or '"kind":"train"' not in metrics.read_text():
            time.sleep(0.05)
        os.kill(int(process.read_text()), signal.SIGINT)

    watching = threading.Thread(target=interrupt, daemon=True)
    watching.start()
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        client.execute()
    watching.join()
    steps = metrics.read_text().count('"kind":"train"')
    assert steps < 10
    second = client_of("first_agent.ipynb", tmp_path)
    [again] = [cell for cell in second.nb.cells if "trainer.fit" in cell.source]
    again.source = plain.replace("held_out)", "held_out, resume=True)")
    second.execute()
    assert "resuming runs/newsroom after step" in printed(second)
    trained = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in trained if line["kind"] == "train"] == [*range(1, 11)]


def answer(request: Request) -> str:
    """Return the answer of the app's model, or the proposal of the larger model."""
    text = "\n".join(message["content"] for message in request.messages)
    if request.body["model"] == "gpt-5-mini":
        return f"<prompt>\n{RULES} {{mail}}\n</prompt>"
    if RULES not in text:
        return "I do not know."
    mail = text.partition(RULES)[2]
    return next(
        desk
        for thing, desk in {"bill": "accounts", "password": "support", "parcel": "shipping"}.items()
        if thing in mail
    )


def test_a_prompt_improves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        client = client_of("better_prompts.ipynb", tmp_path)
        client.execute()
    assert "held-out reward: 0.00 -> 1.00" in printed(client)
    assert f"+{RULES} {{mail}}" in printed(client)
    asyncio.run(check_run(tmp_path / "runs/mailroom"))
