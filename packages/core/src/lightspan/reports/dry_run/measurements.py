"""Measurements of a dry run with the algorithm's own model: what the forecasts start from."""

from __future__ import annotations

import contextlib
import math
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.engines.vllm.description import VLLM
from lightspan.errors import ModelError
from lightspan.learners.protocol import Learner, Loss, PolicyLoss
from lightspan.learners.verl.description import Verl
from lightspan.lightning.episode import Episode
from lightspan.lightning.rows import Row, build_rows
from lightspan.lightning.transitions import Transition
from lightspan.reports.dry_run.sections import RewardReport, RowReport
from lightspan.reports.forecast import (
    MemoryForecast,
    MemoryInputs,
    PolicySize,
    Speed,
    memory_forecast,
    model_shape,
    one_name,
)
from lightspan.reports.server_memory import Served, ServerMemory, server_memory
from lightspan.reports.shard_memory import Sharding, shard_memory
from lightspan.runners.protocol import Runners
from lightspan.schema.spans import SpanKind
from lightspan.training import checkpoints
from lightspan.training.checkpoints import TrainerState
from lightspan.training.embedded import embedded_lora, server_groups, uses_base
from lightspan.training.session import Session
from lightspan.training.settings import TrainerSettings

SAVE_BYTES: Final = 2 * 2**30
"""Checkpoints up to this size are written once, to see how long that takes."""
MOST_UPDATE_TOKENS: Final = 16_384
"""Rows of a timed update hold at most this many tokens (one row at least)."""
_MAXRSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB


class UpdateTimes(NamedTuple):
    """Seconds of the learner's work."""

    step: float
    token: float
    publish: float
    save: float | None


# --- rollouts ---------------------------------------------------------------------------------
class RolloutTimes(NamedTuple):
    """Seconds of a batch of rollouts."""

    overhead: float
    latency: float
    tail: float
    engine_cpu: float


def rollout_times(episodes: Sequence[Episode], wall_s: float, engine_cpu_s: float) -> RolloutTimes:
    """How long the rollouts took, by the attempts' own spans.

    The first rollouts of a runner import and connect, and are slower: those that began after the
    first one had ended speak for a long run, if there are two or more.

    Args:
        wall_s: seconds that the whole batch took.
        engine_cpu_s: CPU-seconds that the engine spent on it.
    """
    spans = [_attempt(episode) for episode in episodes]
    times = [span for span in spans if span is not None]
    if not times:
        return RolloutTimes(wall_s, 0.0, 0.0, 0.0)
    first_end = min(end for _, end in times)
    warm = [end - start for start, end in times if start >= first_end]
    lasted = warm if len(warm) >= 2 else [end - start for start, end in times]
    latency = math.fsum(lasted) / len(lasted)
    span = max(end for _, end in times) - min(start for start, _ in times)
    return RolloutTimes(
        overhead=max(0.0, wall_s - span),
        latency=latency,
        tail=max(lasted) - latency,
        engine_cpu=engine_cpu_s / len(times),
    )


def _attempt(episode: Episode) -> tuple[float, float] | None:
    """When the attempt began and ended, in seconds."""
    roots = [s for s in episode.spans if s.kind is SpanKind.CHAIN and s.name == "attempt"]
    if not roots or not episode.finished:
        return None
    return roots[0].start_ns / 1e9, roots[0].end_ns / 1e9


# --- the learner ------------------------------------------------------------------------------
def practice_rows(transitions: Sequence[Transition], max_length: int | None) -> list[Row]:
    """Rows of the dry run's calls, to time `update` with.

    Their rewards are made up, good and bad in turn: with the real ones, which may all be equal,
    there might be nothing to compute.
    """
    paid = [1.0 if number % 2 else -1.0 for number in range(len(transitions))]
    weights = [1.0 / max(1, len(transitions) * t.tokens) for t in transitions]
    rows = build_rows(
        transitions, advantages=paid, token_weights=weights, max_length=max_length
    ).rows
    kept: list[Row] = []
    tokens = 0
    for row in rows:
        tokens += len(row.ids)
        if kept and tokens > MOST_UPDATE_TOKENS:
            break
        kept.append(row)
    return kept


async def update_times(session: Session, rows: Sequence[Row], folder: Path) -> UpdateTimes:
    """Train on the rows a few times. The session's learner and engine are of no use afterwards.

    An update costs a fixed part and a part per token, which two of different sizes tell apart. The
    very first is not counted: it allocates.
    """
    learner, loss = session.learner, session.algorithm.loss
    shortest = [min(rows, key=lambda row: len(row.ids))]
    await session.learn(partial(_update, learner, rows, loss))
    many = await session.learn(partial(_timed, partial(_update, learner, rows, loss)))
    few = await session.learn(partial(_timed, partial(_update, learner, shortest, loss)))
    started = time.monotonic()
    await session.publish()
    publish = time.monotonic() - started
    tokens = sum(len(row.ids) for row in rows)
    more = tokens - len(shortest[0].ids)
    token = max(0.0, many - few) / more if more else many / tokens
    return UpdateTimes(
        step=max(0.0, many - tokens * token),
        token=token,
        publish=publish,
        save=await _save_time(session, folder),
    )


def _update(learner: Learner, rows: Sequence[Row], loss: Loss) -> None:
    scored = isinstance(loss, PolicyLoss) and loss.importance_cap is not None
    learner.update(rows, loss, old_logprobs=learner.score(rows) if scored else None)


def _timed(work: Callable[[], Any]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


async def _save_time(session: Session, folder: Path) -> float | None:
    """How long one checkpoint takes; None where it would be large."""
    state = TrainerState(run_id="dry-run")
    target = folder / "timed-checkpoint"
    if _checkpoint_bytes(session) > SAVE_BYTES:
        return None
    try:
        save = partial(checkpoints.save, target, state, session.learner.save)
        return float(await session.learn(partial(_timed, save)))
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _checkpoint_bytes(session: Session) -> int:
    """Weights that are trained, and two states of the optimiser for each."""
    try:
        sizes = policy_sizes(session.settings)
    except ModelError:
        return SAVE_BYTES + 1
    return sum(3 * size.trained_bytes * size.trained for size in sizes.values())


def speed_of(
    *,
    start_s: float,
    rollouts: RolloutTimes,
    updates: UpdateTimes,
    rows: RowReport,
    rewards: RewardReport,
    on_cpu: bool,
) -> Speed:
    """The measurements as the time forecast takes them."""
    groups = len(rewards.groups)
    return Speed(
        start_s=start_s,
        overhead_s=rollouts.overhead,
        latency_s=rollouts.latency,
        tail_s=rollouts.tail,
        engine_cpu_s=rollouts.engine_cpu if on_cpu else 0.0,
        step_s=updates.step,
        token_s=updates.token,
        publish_s=updates.publish,
        save_s=updates.save,
        tokens_per_rollout=rows.row_tokens / max(1, rewards.rollouts),
        varying=(rewards.teaching or groups) / max(1, groups),
    )


# --- memory -----------------------------------------------------------------------------------
def policy_sizes(settings: TrainerSettings) -> dict[str, PolicySize]:
    """The size of each policy, as the learner holds it; verl's weights are float32 anywhere.

    Raises:
        ModelError: a model's configuration is not on this machine.
    """
    from lightspan.learners.models import default_dtype

    dtype = _dtype(settings)
    device = "cpu" if isinstance(settings.learner, Verl) else settings.learner_devices[0]
    return {
        name: PolicySize(
            shape=model_shape(spec.model),
            lora=spec.lora,
            weight_bytes=(dtype or default_dtype(device, spec.lora)).itemsize,
            model=spec.model,
        )
        for name, spec in settings.algorithm.policies().items()
    }


def forecast_memory(
    settings: TrainerSettings,
    *,
    process_bytes: int,
    rows: RowReport | None,
    rollouts: int,
    step_rollouts: int,
    servers: ServerMemory | None = None,
) -> MemoryForecast:
    """The memory that `fit` needs for rows like those of the dry run (where there were none, for
    the longest that the model takes).

    Args:
        process_bytes: what this process held before it loaded a model.
        rollouts: how many the dry run had.
        step_rollouts: how many an iteration of `fit` has.
        servers: what vLLM's take; None where the engine is the embedded one.

    Raises:
        ModelError: a model's configuration is not on this machine.
    """
    algorithm = settings.algorithm
    policies = policy_sizes(settings)
    loss = algorithm.loss
    based = uses_base(algorithm.routing())
    tokens = _microbatch(settings, policies, rows, rollouts, step_rollouts)
    share = _trained_share(rows)
    kl = isinstance(loss, PolicyLoss) and loss.kl != 0
    beside = frozenset(_served_as_lora(settings))
    sharded = None
    if isinstance(settings.learner, Verl):
        sharded = shard_memory(
            Sharding(
                description=settings.learner,
                policies=policies,
                devices=[one_name(device) for device in settings.learner_devices],
                tokens=tokens,
                trained_share=share,
                kl=kl,
                beside=beside,
            )
        )
    forecast = memory_forecast(
        MemoryInputs(
            policies=policies,
            base=model_shape(algorithm.base_model) if based else None,
            device=settings.device,
            optimizer=algorithm.optimizer,
            cache_tokens=_cache_tokens(settings, policies),
            microbatch_tokens=tokens,
            trained_share=share,
            process_bytes=process_bytes,
            kl=kl,
            beside=beside,
            engine=None if servers is None else servers.parts,
            learner=sharded,
            ranks=settings.learner_devices,
        )
    )
    return _with_room(forecast)


def vllm_memory(settings: TrainerSettings, description: VLLM) -> ServerMemory:
    """What the servers of a run take.

    Raises:
        ModelError: a model's configuration is not on this machine.
    """
    algorithm = settings.algorithm
    models = {name: spec.model for name, spec in algorithm.policies().items()}
    groups = []
    for policies, rank in server_groups(settings).items():
        shape = model_shape(models.get(policies[0], algorithm.base_model))
        groups.append(Served(policies=policies, shape=shape, lora_rank=rank))
    on_gpu = settings.device.startswith("cuda")
    return server_memory(description, groups, on_gpu=on_gpu, capacity=_capacity)


def _served_as_lora(settings: TrainerSettings) -> list[str]:
    """Policies that the engine serves as LoRA beside their model's weights."""
    if not isinstance(settings.engine, VLLM):
        return list(embedded_lora(settings))
    return [policy for group, rank in server_groups(settings).items() if rank for policy in group]


def _capacity(device: str) -> int | None:
    """Bytes of a GPU in all, if this process sees it."""
    import torch

    number = device.partition(":")[2]
    if not number.isdecimal() or int(number) >= torch.cuda.device_count():
        return None
    return int(torch.cuda.mem_get_info(torch.device(device))[1])


def _dtype(settings: TrainerSettings) -> Any:
    """What the learner's weights were asked to be; None if it decides."""
    import torch

    named = settings.described.dtype
    asked = (settings.learner_options or {}).get("dtype")
    return asked if named is None else getattr(torch, named)


def _cache_tokens(settings: TrainerSettings, policies: Mapping[str, PolicySize]) -> int:
    """Tokens of one model's key-value cache, as the embedded engine sizes it."""
    from lightspan.engines import transformers as engine

    longest = max(size.shape.context for size in policies.values())
    options = settings.engine_options or {}
    asked = options.get("context_length")
    context = min(longest, asked) if asked is not None else longest
    blocks = options.get("num_blocks")
    return engine.cache_tokens(settings.device, context, blocks)


def _microbatch(
    settings: TrainerSettings,
    policies: Mapping[str, PolicySize],
    rows: RowReport | None,
    rollouts: int,
    step_rollouts: int,
) -> int:
    """Tokens of the learner's largest forward pass."""
    from lightspan.learners.budgets import default_token_budget

    described = settings.learner if isinstance(settings.learner, Verl) else settings.described
    asked = (settings.learner_options or {}).get("token_budget") or described.token_budget
    ranks = settings.learner_devices
    budget = int(asked or default_token_budget(ranks[0]))
    if rows is None or not rows.rows:
        return max(budget, max(size.shape.context for size in policies.values()))
    update = rows.row_tokens / max(1, rollouts) * step_rollouts / settings.algorithm.minibatches
    update /= len(ranks)
    return max(rows.longest_row, min(budget, math.ceil(update)))


def _trained_share(rows: RowReport | None) -> float:
    """How much of a microbatch bears loss, at most: microbatches differ, hence a quarter more than
    the mean."""
    if rows is None or not rows.row_tokens:
        return 1.0
    return min(1.0, 1.25 * rows.trained_tokens / rows.row_tokens)


def _with_room(forecast: MemoryForecast) -> MemoryForecast:
    """The forecast with what is free here and now. What this process holds already counts as free:
    `fit` starts from there, and the forecast has it as a part."""
    import psutil
    import torch

    process = next(part.bytes for part in forecast.parts if part.name == "process")
    free = psutil.virtual_memory().available + process
    devices = [
        msgspec.structs.replace(
            each, free_bytes=int(torch.cuda.mem_get_info(torch.device(each.device))[0])
        )
        if _capacity(each.device) is not None
        else each
        for each in forecast.devices
    ]
    return msgspec.structs.replace(forecast, host_free_bytes=int(free), devices=devices)


def resident_bytes() -> int:
    """What this process holds now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The most that this process ever had."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux: `ru_maxrss` survives exec, so a larger parent would be measured
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def runner_bytes(runners: Runners) -> int | None:
    """What all runner processes hold now; None where they are not on this machine."""
    import psutil

    pids = getattr(runners, "pids", None)
    if not pids:
        return None
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it has just died and is replaced
            total += int(psutil.Process(pid).memory_info().rss)
    return total or None
