"""Tokens per CPU-second of the embedded engine, compared with transformers' batching alone.

The model is a random Qwen2 of 0.7 M parameters; prompts have about 70 tokens and answers about 20,
as in the SQL example. The peer is transformers' `ContinuousBatchingManager` on the same model and
requests, with the settings with which it is fastest on a CPU (12 requests and 256 tokens a step),
or with `--peer-defaults` its own. CPU-seconds are those of the generation thread; those of the
event loop are printed too. Runs alternate, and the best of each is kept.

With `--prefixes` the peer is the engine itself with `prefix_sharing=False`, and the unit is calls
per CPU-second. The model is random with the shape of SmolLM2-135M, as in the router example, and
has 64 calls in flight: in groups of 8 with the same prompt (125 tokens, of which the first 40 are
common to all groups), and in a second run with prompts that share nothing. Answers have 4 to 8
tokens.

With `--vllm PYTHON` the peer is a vLLM server of that interpreter (docs/vllm.md), on the model and
the calls of `--prefixes`, in the same float type and with one thread to compute in. It compiles the
model and keeps prefixes too, in blocks of 32 tokens, the least that its CPU kernels take. The unit
is tokens of prompts and answers per second, of wall time and of CPU time. Each repeat has other
prompts, so that no prefix is cached from the repeat before.

Run: python benchmarks/engine.py [--in-flight 64] [--requests 512] [--repeats 3] [--json]
     python benchmarks/engine.py --prefixes [--repeats 3] [--json]
     python benchmarks/engine.py --vllm .venv-vllm/bin/python [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--peer-defaults", action="store_true")
    parser.add_argument("--prefixes", action="store_true", help="against no shared prefixes")
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="against a vLLM server of this interpreter"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    if options.prefixes:
        report_prefixes(options.in_flight, options.repeats, as_json=options.json)
        return
    if options.vllm:
        figures = asyncio.run(beside_vllm(options.vllm, options.in_flight, options.repeats))
        report_vllm(figures, as_json=options.json)
        return
    with tempfile.TemporaryDirectory() as place:
        words = [" ".join(f"w{i}{j}" for i in range(40)) for j in range(40)]
        folder = tiny_model(
            Path(place) / "model", seed=0, hidden=128, layers=3, context=2048, vocabulary=635,
            texts=words,
        )  # fmt: skip
        model = load_model(folder)
        requests = make_requests(options.requests, int(model.config.vocab_size))
        ours, theirs = [], []
        for _ in range(options.repeats):
            engine = run_engine(str(folder), requests, options.in_flight, stream=options.stream)
            ours.append(asyncio.run(engine))
            theirs.append(
                run_peer(folder, requests, options.in_flight, defaults=options.peer_defaults)
            )
    report(best(ours), best(theirs), as_json=options.json)


def report_prefixes(in_flight: int, repeats: int, *, as_json: bool) -> None:
    """Measure and print calls per CPU-second with and without shared prefixes."""
    rates: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        tokenizer = load_tokenizer(tiny_model(Path(place) / "model", seed=0))
        model = pretrained_shape()
        for case, shared in (("groups of 8", True), ("nothing shared", False)):
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
            shared_rate, own_rate = (len(requests) / min(spent[key]) for key in (True, False))
            rates[case] = {"on": shared_rate, "off": own_rate, "ratio": shared_rate / own_rate}
    if as_json:
        print(json.dumps(rates))
        return
    for case, rate in rates.items():
        print(
            f"{case:15} {rate['on']:7.1f} calls per CPU-s with shared prefixes,"
            f" {rate['off']:7.1f} without: {rate['ratio']:.2f}x"
        )


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


def report_vllm(figures: dict[str, list[Measured]], *, as_json: bool) -> None:
    """Print the best rates of both engines, and their ratios."""
    rates = {
        name: Measured(max(each.wall for each in found), max(each.cpu for each in found))
        for name, found in figures.items()
    }
    ours, theirs = rates["engine"], rates["vllm"]
    ratios = Measured(ours.wall / theirs.wall, ours.cpu / theirs.cpu)
    if as_json:
        kept = {name: [each._asdict() for each in found] for name, found in figures.items()}
        print(json.dumps({"figures": kept, "ratios": ratios._asdict()}))
        return
    for name, rate in rates.items():
        print(f"{name:7} {rate.wall:8.0f} tokens a second {rate.cpu:8.0f} a CPU-second")
    print(f"engine / vLLM: {ratios.wall:.2f}x of wall time, {ratios.cpu:.2f}x of CPU time")


def report(ours: dict[str, float], theirs: dict[str, float], *, as_json: bool) -> None:
    rates = {
        name: result["tokens"] / result["cpu_s"]
        for name, result in (("engine", ours), ("peer", theirs))
    }
    ratio = rates["engine"] / rates["peer"]
    if as_json:
        print(json.dumps({"engine": ours, "peer": theirs, "rates": rates, "ratio": ratio}))
        return
    for name, result in (("engine", ours), ("peer", theirs)):
        print(
            f"{name:7} {rates[name]:7.0f} tokens per CPU-s"
            f"  ({result['tokens']:.0f} tokens, {result['cpu_s']:.2f} CPU-s,"
            f" event loop {result.get('loop_cpu_s', 0.0):.2f} CPU-s, wall {result['wall_s']:.2f} s)"
        )
    print(f"engine / transformers' own batching: {ratio:.2f}x")


if __name__ == "__main__":
    main()
