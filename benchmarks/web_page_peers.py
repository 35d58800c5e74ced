"""Cost of the web page beside those of MLflow and Phoenix, with the same traces.

    python benchmarks/web_page_peers.py [--rollouts 2000] [--json PATH]

Each server runs in an environment of its own (`_peers.py`) and gets the same traces (two model
calls and eight tools each): ours through its store, the others by OTLP. Then each is asked for what
its page asks first, a table of 50 traces, and for a text that no trace has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from _peers import peer_environment, peer_python
from _report import Figure, finish
from inspect_store import ANSWER, CALLS, OTHERS, TASK, _fill
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from lightspan.stores import open_store

MISS: Final = "a text that no span has"
BATCH: Final = 100
STARTING_S: Final = 180.0
TRIES: Final = 5


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def send(url: str, body: bytes | None = None, kind: str = "application/json", **more: str) -> Any:
    """Send a request and return the answer's JSON; None if it is no JSON."""
    headers = {
        "Content-Type": kind,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120) as answer:
        data = answer.read()
    try:
        return json.loads(data)
    except ValueError:
        return None


# --- the traces -----------------------------------------------------------------------------------
def _span(trace: bytes, parent: bytes, name: str, start: int, **attributes: str) -> Span:
    return Span(
        trace_id=trace,
        span_id=secrets.token_bytes(8),
        parent_span_id=parent,
        name=name,
        start_time_unix_nano=start,
        end_time_unix_nano=start + 40_000_000,
        attributes=[
            KeyValue(key=key.replace("__", "."), value=AnyValue(string_value=value))
            for key, value in attributes.items()
        ],
    )


def trace(number: int) -> list[Span]:
    """Return the spans of a trace, with the attributes of OpenInference."""
    name, start = secrets.token_bytes(16), 1_790_000_000_000_000_000 + number * 10**9
    root = _span(
        name,
        b"",
        "attempt",
        start,
        openinference__span__kind="CHAIN",
        input__value=TASK,
        output__value=ANSWER,
    )
    llm = {"openinference__span__kind": "LLM", "input__value": TASK, "output__value": ANSWER}
    calls = [_span(name, root.span_id, "chat", start + n, **llm) for n in range(CALLS)]
    tool = {"openinference__span__kind": "TOOL", "output__value": "42 rows"}
    tools = [_span(name, root.span_id, f"tool {n}", start + n, **tool) for n in range(OTHERS)]
    return [root, *calls, *tools]


def requests(total: int) -> Iterator[bytes]:
    """Yield the bodies of OTLP requests with all traces."""
    for first in range(0, total, BATCH):
        request = ExportTraceServiceRequest()
        scope = request.resource_spans.add().scope_spans.add()
        for number in range(first, min(first + BATCH, total)):
            scope.spans.extend(trace(number))
        yield request.SerializeToString()


# --- the servers ----------------------------------------------------------------------------------
def group(pid: int) -> list[int]:
    """Return the process ids of a server and of the processes that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in group(int(child)))]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a server and its processes so far."""
    ticks = 0
    for each in group(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    """Return the resident memory of a server and its processes."""
    texts = (Path(f"/proc/{each}/status").read_text() for each in group(pid))
    return sum(int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) for text in texts) / 1024


@contextmanager
def running(command: list[str], health: str, folder: Path, **variables: str) -> Iterator[int]:
    """Run a server until the end of the block; yield its process id once it answers."""
    environment = peer_environment(**variables)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            end = time.monotonic() + STARTING_S
            while True:
                try:
                    send(health)
                    break
                except (urllib.error.URLError, ConnectionError):
                    if server.poll() is not None or time.monotonic() > end:
                        raise SystemExit((folder / "log").read_text()[-2000:]) from None
                    time.sleep(0.5)
            yield server.pid
        finally:
            server.terminate()
            server.wait()


Measured = dict[str, float]


def measure(pid: int, asks: Mapping[str, Callable[[str], int]]) -> Measured:
    """Ask several times; return the CPU milliseconds of a request, and the server's memory."""
    figures: Measured = {}
    for name, ask in asks.items():
        ask(MISS)  # the first loads modules
        cpu = cpu_s(pid)
        counts = [ask(f"{MISS} {n}") for n in range(TRIES)]  # no server may answer from memory
        figures[name] = 1000 * (cpu_s(pid) - cpu) / TRIES
        print(f"{name}: {counts[0]} traces, {figures[name]:.0f} CPU-ms", flush=True)
    return {**figures, "memory": memory_mib(pid)}


def lightspan(rollouts: int, folder: Path) -> Measured:
    """Measure our page."""

    async def fill() -> None:
        async with open_store(f"sqlite:{folder / 'app.db'}") as store:
            await _fill(store, rollouts)

    asyncio.run(fill())
    port, key = free_port(), secrets.token_urlsafe(16)
    command = [sys.executable, "-m", "lightspan.cli", "ui", f"sqlite:{folder / 'app.db'}"]
    command += ["--port", str(port), "--key-env", "PAGE_KEY"]
    url = f"http://127.0.0.1:{port}"

    def rows(query: str) -> int:
        path = f"{url}/api/v1/stores/app/rollouts?limit=50{query}"
        return len(send(path, Authorization=f"Bearer {key}")["rows"])

    with running(command, f"{url}/health", folder, PAGE_KEY=key) as pid:
        asks = {
            "table": lambda _: rows(""),
            "search": lambda text: rows(f"&text={urllib.parse.quote(text)}"),
        }
        return measure(pid, asks)


def mlflow(rollouts: int, folder: Path) -> Measured:
    """Measure MLflow's page."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = str(peer_python("mlflow-3.17.2").with_name("mlflow"))
    words = [command, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]

    def rows(condition: str) -> int:
        experiment = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": "0"}}
        body = {"locations": [experiment], "max_results": 50, "order_by": ["timestamp_ms DESC"]}
        body |= {"filter": condition} if condition else {}
        answer = send(f"{url}/ajax-api/3.0/mlflow/traces/search", json.dumps(body).encode())
        return len(answer.get("traces", []))

    with running(words, f"{url}/health", folder, MLFLOW_DISABLE_TELEMETRY="true") as pid:
        for body in requests(rollouts):
            kind = "application/x-protobuf"
            send(f"{url}/v1/traces", body, kind, x_mlflow_experiment_id="0")
        asks = {
            "table": lambda _: rows(""),
            "search": lambda text: rows(f"trace.text ILIKE '%{text}%'"),
        }
        return measure(pid, asks)


QUERY: Final = """
query ($filter: String) { projects { edges { node { spans(first: 50,
  sort: {col: startTime, dir: desc}, filterCondition: $filter) { edges { node {
  spanId name statusCode startTime latencyMs input { truncatedValue } output { truncatedValue }
} } } } } } }
"""


def phoenix(rollouts: int, folder: Path) -> Measured:
    """Measure Phoenix's page."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    variables = {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }

    def rows(condition: str) -> int:
        body = {"query": QUERY, "variables": {"filter": condition}}
        answer = send(f"{url}/graphql", json.dumps(body).encode())
        if answer.get("errors"):
            raise SystemExit(f"Phoenix refuses the query: {answer['errors']}")
        [project] = answer["data"]["projects"]["edges"]
        return len(project["node"]["spans"]["edges"])

    command = str(peer_python("phoenix-20.26.1").with_name("phoenix"))
    with running([command, "serve"], f"{url}/v1/projects", folder, **variables) as pid:
        for body in requests(rollouts):
            send(f"{url}/v1/traces", body, "application/x-protobuf")
        while not rows("parent_id is None"):
            time.sleep(1.0)
        time.sleep(20.0)  # it stores in the background
        asks = {
            "table": lambda _: rows("parent_id is None"),
            "search": lambda text: rows(f"parent_id is None and '{text}' in input.value"),
        }
        return measure(pid, asks)


def main() -> int:
    """Measure all servers, print the figures, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=2_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / name for name in ("lightspan", "mlflow", "phoenix")}
        for folder in folders.values():
            folder.mkdir()
        ours = lightspan(options.rollouts, folders["lightspan"])
        peers = {
            "MLflow": mlflow(options.rollouts, folders["mlflow"]),
            "Phoenix": phoenix(options.rollouts, folders["phoenix"]),
        }
    for name, theirs in peers.items():
        for what, unit in (("table", "CPU-ms"), ("search", "CPU-ms"), ("memory", "MiB")):
            figures.append(
                Figure(
                    what=f"{what}, {options.rollouts} traces",
                    unit=unit,
                    ours=ours[what],
                    theirs=theirs[what],
                    peer=name,
                    at_least=1.0,
                )
            )
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
