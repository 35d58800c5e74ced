"""Where do the CPU milliseconds of an app's model call go?

    python benchmarks/call_parts.py [--rollouts 400] [--json PATH] [--functions 8]

Rollouts of one call each, as in training: `LocalRunners` with one process, whose app asks through
the OpenAI client, or through LangChain's; the gateway, a SQLite store on disk and the embedded
engine, with a random model of 0.7 M parameters, in this process. A question has about 70 tokens, an
answer 8. The runner process has made one batch before.

The CPU time of both processes is that of a batch which nothing disturbs. In another batch their
threads are sampled (`_cpu_parts.py`), and the time is divided among the parts by their shares of
the samples. So the total is exact, and the parts are estimates: what wakes a thread, or hands over
Python's lock, goes to the place where the thread waited. `--functions` prints the functions of each
part in which most of the time was spent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from _cpu_parts import CpuParts
from _report import Figure, finish, options_of
from engine_gateway import make_model
from rollouts import run_batch

from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import new_id
from lightspan.schema.routing import Route, Routing, Target
from lightspan.stores import open_store
from lightspan_gateway import Gateway
from lightspan_torch.engine.transformers import TransformersEngine

HERE: Final = Path(__file__).parent
SLOTS: Final = 16
RULES: Final = {
    "engine": ("/torch/", "lightspan_torch/engine", "transformers/models"),
    "render and tokenise": ("/transformers/", "/jinja2/", "<template>", "/tokenizers/"),
    "store": ("lightspan/stores", "/msgspec/"),
    "HTTP server (aiohttp)": ("/aiohttp/", "/multidict/", "/yarl/"),
    "gateway": ("lightspan_gateway", "lightspan/schema", "lightspan/protocols"),
}
"""Parts of the process of the trainer."""
CLIENTS: Final = {"OpenAI's client": "openai", "LangChain's client": "langchain"}


async def measure(client: str, number: int) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Return part → CPU milliseconds a call, and (part, function) → the same."""
    with tempfile.TemporaryDirectory() as folder:
        engine = TransformersEngine({"policy": make_model(Path(folder))})
        await engine.start()
        async with (
            open_store(f"sqlite:///{folder}/run.db") as store,
            Gateway(store, engine) as gateway,
        ):
            target = Target(route=Route.POLICY, policy="policy")
            routing = Routing(gateway_url=gateway.url, default=target)
            resources = await store.put_resources({"routing": routing})
            runners, run_id = LocalRunners(SLOTS, processes=1), new_id("run")
            plan = RunnerPlan(
                store_url=store.url,
                app=f"_call_parts_apps:asks_{client}",
                run_id=run_id,
                sys_path=[str(HERE)],
            )
            await runners.start(plan)
            try:
                await run_batch(store, run_id, resources, 4 * SLOTS)
                [pid] = runners.pids
                before = psutil.Process(pid).cpu_times(), time.process_time()
                await run_batch(store, run_id, resources, number)
                after = psutil.Process(pid).cpu_times(), time.process_time()
                report = Path(tempfile.gettempdir()) / f"call-parts-{pid}.json"
                report.unlink(missing_ok=True)
                report.with_suffix(".begin").touch()
                time.sleep(0.1)
                with CpuParts(RULES) as here:
                    await run_batch(store, run_id, resources, number)
                report.with_suffix(".begin").unlink()
                there = await asyncio.to_thread(_read, report)
            finally:
                await runners.stop()
        await engine.close()
    spent = sum(after[0][:2]) - sum(before[0][:2]), after[1] - before[1]
    parts: Counter[str] = Counter()
    lines: Counter[tuple[str, str]] = Counter()
    there_ns, there_lines = there["ns"], {(p, f): ns for p, f, ns in there["lines"]}
    sides = [("app", spent[0], there_ns, there_lines), ("trainer", spent[1], here.ns, here.lines)]
    for side, cpu_s, ns, found in sides:
        scale = 1000 * cpu_s / number / max(1, sum(ns.values()))
        parts.update({f"{side}: {part}": value * scale for part, value in ns.items()})
        lines.update({(f"{side}: {part}", f): value * scale for (part, f), value in found.items()})
    return parts, lines


def _read(report: Path) -> Any:
    """Wait for the file that the runner process writes, and return its content."""
    while not report.exists():
        time.sleep(0.02)
    found = json.loads(report.read_text())
    report.unlink()
    return found


def main() -> int:
    """Run the benchmark and print the table; return the exit status."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--rollouts", type=int, default=400)
    parser.add_argument("--clients", nargs="+", choices=CLIENTS.values(), default=["openai"])
    parser.add_argument("--functions", type=int, default=0, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    for name, client in CLIENTS.items():
        if client in options.clients:
            parts, lines = asyncio.run(measure(client, options.rollouts))
            figures += _figures(name, parts)
            _print_functions(lines, parts, options.functions)
    return finish(figures, options.json)


def _figures(name: str, parts: Counter[str]) -> Sequence[Figure]:
    total = Figure(what=f"a call through {name}", unit="CPU-ms", ours=sum(parts.values()))
    sorted_parts = sorted(parts.items(), key=lambda item: (item[0].partition(":")[0], -item[1]))
    return [total, *(Figure(what=f"  {p}", unit="CPU-ms", ours=ms) for p, ms in sorted_parts)]


def _print_functions(lines: Counter[tuple[str, str]], parts: Any, count: int) -> None:
    for part in parts if count else ():
        print(f"{part}: {parts[part]:.3f} ms")
        own = Counter({f: ms for (p, f), ms in lines.items() if p == part})
        for function, ms in own.most_common(count):
            print(f"    {ms:.3f} {function}")


if __name__ == "__main__":
    sys.exit(main())
