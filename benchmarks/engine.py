"""CPU time and memory of the embedded engine, compared with transformers' batching alone.

    python benchmarks/engine.py [--only tiny shared memory] [--vllm PYTHON] [--repeats 3]
        [--json PATH]

- tiny: a random Qwen2 of 0.7 M parameters; prompts have about 70 tokens and answers about 20, as in
  the SQL example. The peer is transformers' `ContinuousBatchingManager` on the same model and
  requests, with the settings with which it is fastest on a CPU (12 requests and 256 tokens a step),
  or with `--peer-defaults` its own. CPU-seconds are those of the generation thread.
- shared: the peer is the engine itself with `prefix_sharing=False`. The model is random with the
  shape of SmolLM2-135M, as in the router example, and has 64 calls in flight: in groups of 8 with
  the same prompt (125 tokens, of which the first 40 are common to all groups), and in a second run
  with prompts that share nothing. Answers have 4 to 8 tokens.
- memory: highest resident memory of a process that makes the calls of `shared`, less that of one
  that only loads the model.

With `--vllm PYTHON` a vLLM server of that interpreter (docs/guides/vllm.md) is measured too, on the
model and the calls of `shared`, in the same float type and with one thread to compute in. It
compiles the model and keeps prefixes too, in blocks of 32 tokens, the least that its CPU kernels
take. The unit is tokens of prompts and answers per second, of wall time and of CPU time. Each
repeat has other prompts, so that no prefix is cached from the repeat before.

Runs alternate, and the best of each is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import transformers
from _report import Figure, finish, options_of
from _workload import pretrained_shape
from transformers import GenerationConfig

from lightspan.protocols.engine import GenerationRequest, TokenEngine
from lightspan.schema.token_records import Sampling
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine

PARTS = ("tiny", "shared", "memory")
TEMPERATURE = 0.7
NEVER = -1
"""In place of an end-of-sequence id: none, so that both sides generate the same number of
tokens."""

Request = tuple[list[int], int]
"""(prompt ids, number of tokens to generate)."""


def make_requests(count: int, vocabulary: int) -> list[Request]:
    rng = random.Random(0)
    return [
        (
            [rng.randrange(10, vocabulary) for _ in range(rng.randint(60, 80))],
            rng.randint(14, 26),
        )
        for _ in range(count)
    ]


def make_groups(vocabulary: int, *, shared: bool, seed: int = 0) -> list[Request]:
    """Return 64 requests: if `shared`, in groups of 8 with the same prompt, else all different."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(count)]

    common = ids(40)
    prompts = [common + ids(85) for _ in range(8) for _ in range(8)]
    if shared:
        prompts = [prompts[number // 8] for number in range(64)]
    else:
        prompts = [ids(125) for _ in prompts]
    return [(prompt, rng.randint(4, 8)) for prompt in prompts]


async def ask(
    engine: TokenEngine, requests: Sequence[Request], in_flight: int, *, stream: bool = False
) -> None:
    """Send all requests to the engine, at most `in_flight` at a time, and wait for the answers."""
    gate = asyncio.Semaphore(in_flight)

    async def one(number: int) -> None:
        prompt, tokens = requests[number]
        request = GenerationRequest(
            request_id=str(number),
            policy="policy",
            prompt_ids=prompt,
            sampling=Sampling(max_tokens=tokens, temperature=TEMPERATURE),
        )
        async with gate:
            async for _ in engine.generate(request, stream=stream):
                pass

    await asyncio.gather(*(one(number) for number in range(len(requests))))


async def run_engine(
    model: Any,
    requests: Sequence[Request],
    in_flight: int,
    *,
    stream: bool = False,
    warm_up: int = 32,
    **options: Any,
) -> dict[str, float]:
    """Return the engine's tokens and CPU seconds, and the CPU seconds of the event loop."""
    engine = TransformersEngine({"policy": model}, **options)
    await engine.start()
    await ask(engine, requests[:warm_up], in_flight, stream=stream)
    before, loop_s, wall_s = engine.usage(), time.thread_time(), time.perf_counter()
    await ask(engine, requests, in_flight, stream=stream)
    after = engine.usage()
    result = {
        "tokens": after["tokens"] - before["tokens"],
        "cpu_s": after["cpu_s"] - before["cpu_s"],
        "loop_cpu_s": time.thread_time() - loop_s,
        "wall_s": time.perf_counter() - wall_s,
    }
    await engine.close()
    return result


def run_peer(
    folder: Path, requests: Sequence[Request], in_flight: int, *, defaults: bool
) -> dict[str, float]:
    """Return the same figures of transformers' manager, with `in_flight` requests at a time."""
    # transformers 5.0 has no such class
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model: Any = load_model(folder)
    sizes: dict[str, Any] = (
        {} if defaults else {"max_requests_per_batch": 12, "max_batch_tokens": 256}
    )
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, temperature=TEMPERATURE, eos_token_id=NEVER
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            allow_block_sharing=False, return_logprobs=True, num_blocks=256, page_size=64, **sizes
        ),
    )
    spent = _meter(manager)
    manager.start()
    tokens, start, wall_s = 0, 0.0, 0.0
    for number, (waiting, counted) in enumerate(((requests[:32], False), (requests, True))):
        start, wall_s, queue = spent["cpu_s"], time.perf_counter(), list(waiting)
        running = 0
        while queue or running:
            while queue and running < in_flight:
                prompt, count = queue.pop()
                manager.add_request(prompt, f"{number}-{len(queue)}", max_new_tokens=count)
                running += 1
            done = manager.get_result(timeout=1)
            if done is not None:
                running -= 1
                tokens += len(done.generated_tokens) if counted else 0
    result = {
        "tokens": float(tokens),
        "cpu_s": spent["cpu_s"] - start,
        "wall_s": time.perf_counter() - wall_s,
    }
    manager.stop(block=True)
    return result


def _meter(manager: Any) -> dict[str, float]:
    """Return a dict that always has the CPU seconds of the manager's thread as of its last step."""
    spent = {"cpu_s": 0.0}
    step = manager._generation_loop_body

    def metered(*arguments: Any, **options: Any) -> Any:
        goes_on = step(*arguments, **options)
        spent["cpu_s"] = time.thread_time()
        return goes_on

    manager._generation_loop_body = metered
    return spent


def best(results: Sequence[dict[str, float]]) -> dict[str, float]:
    return max(results, key=lambda result: result["tokens"] / result["cpu_s"])


def main() -> int:
    """Measure and print the figures; return the exit status."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--peer-defaults", action="store_true")
    parser.add_argument("--vllm", metavar="PYTHON", help="a vLLM server of this interpreter too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    figures: list[Figure] = []
    if "memory" in options.only:  # first: a process starts with the peak of the one that forks it
        figures.append(growth_of_memory(options.in_flight))
    if "tiny" in options.only:
        figures.append(beside_transformers(options))
    if "shared" in options.only:
        figures += beside_no_sharing(options.in_flight, options.repeats)
    if options.vllm:
        rates = asyncio.run(beside_vllm(options.vllm, options.in_flight, options.repeats))
        figures += figures_of_vllm(rates)
    return finish(figures, options.json)


def beside_transformers(options: argparse.Namespace) -> Figure:
    """Measure the tiny model with the engine and with transformers' manager, in turns."""
    with tempfile.TemporaryDirectory() as place:
        words = [" ".join(f"w{i}{j}" for i in range(40)) for j in range(40)]
        folder = tiny_model(
            Path(place) / "model", seed=0, hidden=128, layers=3, context=2048, vocabulary=635,
            texts=words,
        )  # fmt: skip
        requests = make_requests(options.requests, int(load_model(folder).config.vocab_size))
        ours, theirs = [], []
        for _ in range(options.repeats):
            engine = run_engine(str(folder), requests, options.in_flight, stream=options.stream)
            ours.append(asyncio.run(engine))
            theirs.append(
                run_peer(folder, requests, options.in_flight, defaults=options.peer_defaults)
            )
    engine_run, peer_run = best(ours), best(theirs)
    return Figure(
        what=f"tiny model, {options.requests} calls",
        unit="tokens a CPU-s",
        ours=engine_run["tokens"] / engine_run["cpu_s"],
        peer=f"transformers {transformers.__version__}",
        theirs=peer_run["tokens"] / peer_run["cpu_s"],
        more_is_better=True,
        at_least=1,
        note=f"event loop {engine_run['loop_cpu_s']:.2f} CPU-s, wall {engine_run['wall_s']:.1f} s",
    )


def beside_no_sharing(in_flight: int, repeats: int) -> list[Figure]:
    """Measure calls per CPU-second with and without shared prefixes."""
    figures = []
    with tempfile.TemporaryDirectory() as place:
        tokenizer = load_tokenizer(tiny_model(Path(place) / "model", seed=0))
        model = pretrained_shape()
        for what, shared, target in (
            ("groups of 8 prompts", True, 3.6),
            ("nothing to share", False, None),
        ):
            requests = make_groups(int(model.config.vocab_size), shared=shared)
            spent: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(2 * repeats):
                sharing = turn % 2 == 0
                result = asyncio.run(
                    run_engine(
                        model, requests, in_flight,
                        warm_up=0, prefix_sharing=sharing, tokenizers={"policy": tokenizer},
                    )
                )  # fmt: skip
                spent[sharing].append(result["cpu_s"])
            figures.append(
                Figure(
                    what=f"SmolLM2's shape, {what}",
                    unit="calls a CPU-s",
                    ours=len(requests) / min(spent[True]),
                    peer="without sharing",
                    theirs=len(requests) / min(spent[False]),
                    more_is_better=True,
                    at_least=target,
                )
            )
    return figures


def growth_of_memory(in_flight: int) -> Figure:
    """Measure by how much the calls of groups of 8 raise a process's highest resident memory."""
    peaks = []
    for calls in (False, True):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as processes:
            peaks.append(processes.submit(_peak_memory, calls, in_flight).result())
    return Figure(
        what="SmolLM2's shape, groups of 8 prompts: added memory",
        unit="MB",
        ours=(peaks[1] - peaks[0]) / 1e6,
        note=f"peak {peaks[1] / 1e6:,.0f} MB, {peaks[0] / 1e6:,.0f} MB with the model alone",
    )


def _peak_memory(calls: bool, in_flight: int) -> int:
    """Return the highest resident memory of this process, in bytes, after the calls if `calls`."""
    torch.set_num_threads(1)
    model = pretrained_shape()
    if calls:
        with tempfile.TemporaryDirectory() as place:
            tokenizer = load_tokenizer(tiny_model(Path(place) / "model", seed=0))
            requests = make_groups(int(model.config.vocab_size), shared=True)
            tokenizers = {"policy": tokenizer}
            asyncio.run(run_engine(model, requests, in_flight, warm_up=0, tokenizers=tokenizers))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Measured(NamedTuple):
    """Tokens per second of wall time and of CPU time."""

    wall: float
    cpu: float


async def beside_vllm(python: str, in_flight: int, repeats: int) -> dict[str, list[Measured]]:
    """Return the rates of our engine and of a vLLM server, measured in turns."""
    found: dict[str, list[Measured]] = {"engine": [], "vllm": []}
    with tempfile.TemporaryDirectory() as place:
        folder = tiny_model(Path(place) / "model", seed=0)  # its tokenizer
        model = pretrained_shape()
        model.save_pretrained(folder)
        description = VLLM(
            python=python,
            context_length=2048,
            # of 128 tokens by default on a CPU, of which these prompts fill none to be shared
            arguments=("--block-size", "32"),
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
        )
        embedded = TransformersEngine({"policy": folder})
        engines: dict[str, TokenEngine] = {
            "engine": embedded,
            "vllm": VLLMEngine(description, {"policy": folder}, logs=place),
        }
        try:
            for engine in engines.values():
                await engine.start()
                await ask(engine, _groups(model, seed=-1), in_flight)
            for seed in range(repeats):
                requests = _groups(model, seed=seed)
                for name, engine in engines.items():
                    found[name].append(await _measure(engine, requests, in_flight))
        finally:
            for engine in engines.values():
                await engine.close()
    return found


def _groups(model: Any, seed: int) -> list[Request]:
    return make_groups(int(model.config.vocab_size), shared=True, seed=seed)


async def _measure(engine: TokenEngine, requests: list[Request], in_flight: int) -> Measured:
    wall, cpu = time.perf_counter(), _cpu_s()
    await ask(engine, requests, in_flight)
    wall, cpu = time.perf_counter() - wall, _cpu_s() - cpu
    tokens = sum(len(prompt) + count for prompt, count in requests)
    return Measured(tokens / wall, tokens / cpu)


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of all that it started."""
    here = psutil.Process()
    times = [each.cpu_times() for each in (here, *here.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def figures_of_vllm(rates: dict[str, list[Measured]]) -> list[Figure]:
    """Return the best rates of both engines."""
    return [
        Figure(
            what=f"SmolLM2's shape, groups of 8 prompts, of {what}",
            unit=unit,
            ours=max(getattr(each, key) for each in rates["engine"]),
            peer="vLLM",
            theirs=max(getattr(each, key) for each in rates["vllm"]),
            more_is_better=True,
        )
        for what, unit, key in (
            ("wall time", "tokens a s", "wall"),
            ("CPU time", "tokens a CPU-s", "cpu"),
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
