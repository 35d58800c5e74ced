"""CPU time of the gateway per call and per streamed chunk, compared with both peers.

Recording of the calls is included.

    python benchmarks/gateway.py [--calls 400] [--rounds 5] [--json PATH]

Every gateway runs in processes of its own and records every call; another process sends the calls.
The CPU time of the gateway's processes and their children is counted until they have nothing left
to do. Ours records to SQLite, and is measured with both ways of answering:

- forwarded: the answer comes over HTTP from a model server that answers instantly, the same one
  that stands behind the peers;
- policy: the answer comes from an engine in the gateway's process, as when training; template,
  detokenisation and token records included. The engine has its tokens ready.

0.3.0 is its LiteLLM proxy with its store server (memory), as its trainer starts them; 1.0.2 is
`agl-server` (memory). A figure is the best of the rounds, in which all take turns. The cost of a
streamed chunk is the difference between long and short streams, divided by the chunks, so that the
cost of the call itself cancels out. 0.3.0 waits for the whole answer and cuts it into chunks. 1.0.2
refuses streams, which is checked.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from _gateway_server import FROZEN, POLICY
from _peers import HERE, PeerError, peer_environment, peer_python
from _report import Figure, finish, options_of
from _upstream import Upstream
from peer_gateway import free_port

from lightspan.schema import semconv as c
from lightspan.schema.records import new_id

OLD, NEW = "agentlightning-0.3.0", "agentlightning-1.0.2"
WAYS: Final = ("forwarded", "policy")
IN_FLIGHT: Final = (1, 16, 64)
CALL_MS, CHUNK_MS = 1.5, 0.05
QUESTION: Final = [{"role": "user", "content": "How many singers are there? " * 8}]
TOKENS: Final = 16
"""Number of tokens of an answer that is not streamed."""
SHORT, LONG = 4, 64
"""Numbers of tokens of the two streams that are compared."""
SPANS_A_CALL: Final = 7
"""Number of spans that 0.3.0 records for one call."""


@dataclass
class Server:
    """A gateway that is measured."""

    name: str
    process: subprocess.Popen[str]
    url: str
    """URL of the route for chat completions."""
    headers: dict[str, str] = field(default_factory=dict)
    share: int = 1
    """The gateway gets this many times fewer calls than ours, because it is slower."""
    asked: int = 0

    def cpu_s(self) -> float:
        """Return the CPU seconds of the gateway's processes so far."""
        root = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))

    def settled_cpu_s(self) -> float:
        """Wait until the gateway has written all calls; return the CPU seconds of its processes."""
        before = self.cpu_s()
        for _ in range(20):
            time.sleep(0.25)
            now = self.cpu_s()
            if now - before < 0.015:
                return now
            before = now
        return before

    def ask(self) -> dict[str, Any]:
        """Send the process a line, and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next line of the process's output, from JSON.

        Raises:
            PeerError: the process ended, or its line is not JSON.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        try:
            return json.loads(line)  # type: ignore[no-any-return]
        except ValueError as error:
            raise PeerError(f"{self.name} could not be started: it said {line!r}") from error


# --- the servers ----------------------------------------------------------------------------
@contextmanager
def running(command: list[str], *, peer: bool, talks: bool, log: Path) -> Iterator[Any]:
    """Start a process, and end it after the block. What it logs goes to the file `log`."""
    with log.open("w") as logged:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if talks else logged,
            stderr=logged,
            text=True,
            cwd=log.parent,
            env=peer_environment() if peer else None,
        )
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10 if talks else 0.1)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def servers(upstream: str, folder: Path) -> Iterator[list[Server]]:
    """Start all gateways: ours for both ways of answering, 1.0.2 and 0.3.0."""
    with ExitStack() as stack:

        def start(name: str, command: list[str], *, peer: bool, talks: bool = True) -> Any:
            log = folder / f"{name}.log"
            return stack.enter_context(running(command, peer=peer, talks=talks, log=log))

        script = str(HERE / "_gateway_server.py")
        ours = Server("ours", start("ours", [sys.executable, script, upstream], peer=False), "")
        found = ours.read()
        chat = found["url"] + "/v1/chat/completions"
        token = {"Authorization": f"Bearer {found['token']}"}
        ways = [
            Server(name, ours.process, chat, {**token, c.HEADER_AGENT: agent})
            for name, agent in zip(WAYS, (FROZEN, POLICY), strict=True)
        ]
        python = str(peer_python(OLD))
        command = [python, "-I", str(HERE / "peer_gateway.py"), upstream]
        old = Server(OLD, start(OLD, command, peer=True), "", share=10)
        yield [*ways, _newer(start, upstream), old]


def _newer(start: Any, upstream: str) -> Server:
    """Start 1.0.2, register our model server with it, and create a rollout."""
    port = free_port()
    origin = f"http://127.0.0.1:{port}"
    command = [
        *(str(peer_python(NEW)), "-I", "-m", "agentlightning.server"),
        *("host=127.0.0.1", f"port={port}", "default_proxy.model_name=model"),
        *("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled"),
    ]
    process = start(NEW, command, peer=True, talks=False)
    for _ in range(240):
        try:
            _post(f"{origin}/api/models", [{"model": "model", "endpoint": upstream}])
            break
        except urllib.error.URLError:
            if process.poll() is not None:
                break
            time.sleep(0.25)
    else:
        raise PeerError(f"{NEW}: agl-server does not answer")
    if process.poll() is not None:
        raise PeerError(f"{NEW}: agl-server ended with status {process.returncode}")
    _post(f"{origin}/api/rollouts", [{"input": {}, "rollout_id": "ro"}])
    url = f"{origin}/proxy/rollout/ro/attempt/0/mode/train/openai/v1/chat/completions"
    return Server(NEW, process, url, share=3)


def _post(url: str, body: Any) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def recorded(server: Server) -> int:
    """Return the number of calls that a gateway has recorded."""
    if server.name == NEW:
        url = server.url.partition("/proxy/")[0] + "/api/rollouts/ro/events"
        with urllib.request.urlopen(url, timeout=30) as response:
            return len(json.load(response))
    count = int(server.ask()["recorded"])
    return count // SPANS_A_CALL if server.name == OLD else count


# --- the load -------------------------------------------------------------------------------
def load(pipe: Connection) -> None:
    """Run the process that sends requests, as commands from `pipe` say."""
    asyncio.run(_load(pipe))


async def _load(pipe: Connection) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            url, headers, body, in_flight, calls = order
            left = iter(range(calls))
            asked = [_ask(session, url, headers, body, left) for _ in range(in_flight)]
            pipe.send(sum(await asyncio.gather(*asked)))


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    headers: dict[str, str],
    body: dict[str, Any],
    left: Iterator[int],
) -> int:
    events = 0
    for _ in left:
        own = {**headers, c.HEADER_CALL_ID: new_id("call")}
        async with session.post(url, json=body, headers=own) as got:
            events += (await got.read()).count(b"data: ")
            assert got.status == 200, await got.text()
    return events


class Bench:
    """Sends calls to a gateway through the other process, and measures their cost."""

    def __init__(self, pipe: Connection, calls: int) -> None:
        self._pipe = pipe
        self._calls = calls

    def cost(self, server: Server, in_flight: int, **more: Any) -> tuple[float, float]:
        """Return (CPU milliseconds, streamed events) per call."""
        calls = max(in_flight, self._calls // server.share)
        body = {"model": "model", "messages": QUESTION, "max_tokens": TOKENS, **more}
        before = server.cpu_s()
        self._pipe.send((server.url, server.headers, body, in_flight, calls))
        events = self._pipe.recv()
        server.asked += calls
        return (server.settled_cpu_s() - before) / calls * 1e3, events / calls

    def stream(self, server: Server) -> tuple[float, float]:
        """Return the CPU milliseconds of a long streamed call, and of one of its chunks."""
        short, few = self.cost(server, 16, stream=True, max_tokens=SHORT)
        long, many = self.cost(server, 16, stream=True, max_tokens=LONG)
        return long, (long - short) / (many - few)


def refuses_streams(server: Server) -> bool:
    """Return whether the gateway answers a streaming call with status 400."""
    try:
        _post(server.url, {"model": "model", "messages": QUESTION, "stream": True})
    except urllib.error.HTTPError as error:
        return error.code == 400
    return False


# --- the table ------------------------------------------------------------------------------
Costs = dict[tuple[str, str], float]
"""(gateway, what was measured) → CPU milliseconds."""


def measure(calls: int, rounds: int, folder: Path) -> Costs:
    """Return the lowest costs of all rounds."""
    context = get_context("spawn")
    pipe, other = context.Pipe()
    asking = context.Process(target=load, args=(other,), daemon=True)
    asking.start()
    bench, best = Bench(pipe, calls), Costs()

    def keep(server: Server, what: str, cost: float) -> None:
        key = server.name, what
        best[key] = min(cost, best.get(key, cost))

    with Upstream() as upstream, servers(upstream, folder) as all_of_them:
        for server in all_of_them:
            if server.name == OLD:
                server.url = server.read()["url"] + "/v1/chat/completions"
            bench.cost(server, 8)
            bench.cost(server, 64)
        for _ in range(rounds):
            for in_flight in IN_FLIGHT:
                for server in all_of_them:
                    keep(server, f"{in_flight} in flight", bench.cost(server, in_flight)[0])
            for server in all_of_them:
                if server.name != NEW:
                    whole, chunk = bench.stream(server)
                    keep(server, "stream", whole)
                    keep(server, "chunk", chunk)
        check(all_of_them)
    pipe.send(None)
    asking.join()
    return best


def check(all_of_them: list[Server]) -> None:
    """Check that every gateway recorded all calls (0.3.0 may record some calls twice).

    Raises:
        PeerError: a gateway recorded something else, or 1.0.2 streams after all.
    """
    asked: dict[int, int] = {}
    for server in all_of_them:
        asked[server.process.pid] = asked.get(server.process.pid, 0) + server.asked
    for server in all_of_them:
        wanted, found = asked[server.process.pid], recorded(server)
        if found < wanted or (found > wanted and server.name in WAYS):
            raise PeerError(f"{server.name} recorded {found} of {wanted} calls")
        if server.name == NEW and not refuses_streams(server):
            raise PeerError(f"{NEW} takes streams: measure them")


def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__)
    parser.add_argument("--calls", type=int, default=400, help="calls of ours in a measurement")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        best = measure(options.calls, options.rounds, Path(folder))
    return finish([*calls_of(best), *streams_of(best)], options.json)


def calls_of(best: Costs) -> list[Figure]:
    """Return the rows for calls that are not streamed, each compared with both peers."""
    return [
        Figure(
            what=f"call, {way}, {in_flight} in flight",
            unit="CPU-ms",
            ours=best[way, f"{in_flight} in flight"],
            peer=peer,
            theirs=best[peer, f"{in_flight} in flight"],
            at_most=CALL_MS,
        )
        for way in WAYS
        for in_flight in IN_FLIGHT
        for peer in (OLD, NEW)
    ]


def streams_of(best: Costs) -> list[Figure]:
    """Return the rows for streamed calls and for one chunk."""
    what, unit = f"call streamed in {LONG} chunks", "CPU-ms"
    found = []
    for way in WAYS:
        ours, theirs = best[way, "stream"], best[OLD, "stream"]
        found.append(Figure(what=f"{what}, {way}", unit=unit, ours=ours, peer=OLD, theirs=theirs))
    for way in WAYS:
        ours = best[way, "chunk"]
        found.append(Figure(what=f"each chunk, {way}", unit=unit, ours=ours, at_most=CHUNK_MS))
    return found


if __name__ == "__main__":
    sys.exit(main())
