"""Fine-tune a small model on recorded calls, and run the app with it and with its endpoint."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lightspan.algorithms.lightning_rl import LightningRL
from lightspan.algorithms.protocol import (
    Algorithm,
    Metrics,
    PolicySpec,
    TrainerContext,
    local_model,
)
from lightspan.algorithms.recorded_attempts import Query, Time
from lightspan.errors import ConfigError, DataError
from lightspan.plugins import load_plugin
from lightspan.progress import Reporter
from lightspan.protocols.learner import LoRA
from lightspan.runners.app import App
from lightspan.schema.routing import Routing, make_routing
from lightspan.stores import public_url
from lightspan.trainer import Trainer
from lightspan_tools.compression.measurement import Measurement, read_measurement
from lightspan_tools.compression.recorded import Recorded, low_scores, read_recorded
from lightspan_tools.compression.report import CompressionReport, FineTuning

if TYPE_CHECKING:
    from lightspan_torch.sft.chat_dataset import Chats

RATE_FACTOR: Final = 10
"""Default learning rate of the fine-tuning, relative to that of reinforcement learning, whose
gradients are noisier."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Settings of `lightspan compress`, which documents them."""

    store: str
    model: str
    folder: Path
    min_reward: float | None = None
    agents: tuple[str, ...] = ()
    service: str | None = None
    since: Time | None = None
    until: Time | None = None
    epochs: float = 3.0
    batch_size: int = 8
    learning_rate: float | None = None
    lora: int | None = None
    device: str = "cpu"
    seed: int = 0
    app: App | None = None
    tasks: Path | None = None
    runners: int = 8
    prices: tuple[float, float] | None = None
    price_per_hour: float | None = None

    @property
    def adapters(self) -> LoRA | None:
        """The adapters to train; None to train all weights."""
        return None if self.lora is None else LoRA(rank=self.lora)

    def selection(self) -> dict[str, Any]:
        """Return which calls are imitated, as keyword arguments of `SFT`."""
        return {
            "min_reward": self.min_reward,
            "service": self.service,
            "agents": self.agents,
            "since": self.since,
            "until": self.until,
        }


class _Endpoint(Algorithm):
    """Algorithm without training, in which all calls go where the app sends them."""

    def policies(self) -> dict[str, PolicySpec]:
        return {}

    def routing(self) -> Routing:
        return make_routing({}, None, "policy")

    async def run_step(self, trainer: TrainerContext) -> Metrics:
        raise NotImplementedError


def plan(settings: Compression, reporter: Reporter) -> CompressionReport:
    """Return what would be imitated, and what the recorded calls cost. Nothing is written.

    Raises:
        ConfigError: a setting is invalid.
        DataError: the store has no call to imitate.
    """
    from lightspan_torch.sft.chat_dataset import report_unmatched

    recorded = _recorded(settings)
    chats = _choose(settings, settings, reporter)
    report_unmatched(settings.agents, chats.agents, reporter)
    tuning = FineTuning(
        demonstrations=len(chats.chats),
        left_out=dict(chats.left_out),
        note=low_scores(chats.scores),
    )
    return CompressionReport(settings=settings, recorded=recorded, tuning=tuning)


def run(settings: Compression, reporter: Reporter, *, resume: bool = False) -> CompressionReport:
    """Fine-tune the model on what was recorded, and measure it if there is an app.

    Args:
        settings: the settings.
        reporter: reports progress.
        resume: whether to continue an interrupted run, or to measure a finished model.

    Raises:
        ConfigError: the folder is in use, or an interrupted run had other settings.
        DataError: the store has no call to imitate.
        KeyboardInterrupt: on Ctrl-C; `resume=True` continues.
        LightspanError: a model cannot be loaded, or the app cannot be run.
    """
    path, state = _open_state(settings, resume=resume)
    asked, settings = settings, replace(settings, since=state.since, until=state.until)
    recorded = _recorded(settings)
    if state.tuning is None:
        note = low_scores(_choose(settings, asked, reporter).scores)
        if note:
            reporter.line(note)
        try:
            state.tuning = _fine_tune(settings, note, reporter, resume=resume)
        finally:
            if _is_begun(settings.folder):
                _write(path, state)
    before = after = None
    if settings.app is not None:
        reporter.line("held-out tasks with the app's own endpoint")
        before = _measure(settings, settings.app, _Endpoint(), "endpoint", reporter)
        reporter.line(f"held-out tasks with {settings.folder}")
        optimize = list(settings.agents) or "*"
        small = LightningRL(settings.folder, optimize=optimize, learning_rate=1e-6)
        after = _measure(settings, settings.app, small, "small", reporter)
    return CompressionReport(
        settings=settings, recorded=recorded, tuning=state.tuning, before=before, after=after
    )


def _recorded(settings: Compression) -> Recorded:
    query = Query.of(settings.service, settings.since, settings.until)
    recorded = read_recorded(settings.store, query, settings.agents)
    if not recorded.attempts:
        raise DataError(
            f"store {public_url(settings.store)} has no attempts of production with these "
            "settings: record the app first, with LIGHTSPAN_STORE or lightspan.record"
        )
    return recorded


def _choose(settings: Compression, asked: Compression, reporter: Reporter) -> Chats:
    """Check the settings, and return the calls to imitate.

    Args:
        settings: the settings.
        asked: the settings as the user gave them, for the error message.
        reporter: reports patterns of agents that match none.

    Raises:
        ConfigError: a setting is invalid.
        DataError: the store has no call to imitate.
    """
    from lightspan_torch.sft.chat_dataset import load_chats, nothing_to_imitate, report_unmatched

    _sft(settings, settings.learning_rate)
    chats = load_chats(settings.store, **settings.selection())
    if not chats.chats:
        report_unmatched(settings.agents, chats.agents, reporter)
        raise nothing_to_imitate(settings.store, asked.selection(), chats.left_out)
    return chats


def _fine_tune(settings: Compression, note: str, reporter: Reporter, *, resume: bool) -> FineTuning:
    rate = settings.learning_rate
    if rate is None:
        policy = PolicySpec(model=local_model(settings.model), lora=settings.adapters)
        chosen = load_plugin("api", "choose_rate")({"policy": policy})
        rate = RATE_FACTOR * chosen.value
        why = f"{RATE_FACTOR} times that of reinforcement learning for {chosen.why}"
        line = str(chosen._replace(value=rate, why=why))
        reporter.line(line.replace("learning_rate=", "--learning-rate"))
    sft = _sft(settings, rate)
    result = sft.fit(folder=settings.folder, reporter=reporter, resume=resume)
    return FineTuning(
        demonstrations=result.demonstrations,
        left_out=result.left_out,
        losses=result.losses,
        seconds=result.seconds,
        note=note,
    )


def _sft(settings: Compression, rate: float | None) -> Any:
    """Return the `SFT` of the settings.

    Raises:
        ConfigError: a setting is invalid.
    """
    return load_plugin("api", "SFT")(
        settings.model,
        from_store=settings.store,
        learning_rate=rate,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        lora=settings.adapters,
        device=settings.device,
        seed=settings.seed,
        **settings.selection(),
    )


def _measure(
    settings: Compression, app: App, algorithm: Algorithm, name: str, reporter: Reporter
) -> Measurement:
    """Run the app on the held-out tasks, and return rewards and costs.

    The run's folder is replaced, because it would add to an earlier one.
    """
    folder = _sibling(settings.folder, "measured") / name
    shutil.rmtree(folder, ignore_errors=True)
    options: dict[str, Any] = {"device": settings.device} if algorithm.policies() else {}
    trainer = Trainer(
        algorithm, runners=settings.runners, folder=folder, reporter=reporter, **options
    )
    evaluation = trainer.evaluate(app, settings.tasks or [])
    return read_measurement(trainer.settings.store_url, evaluation, settings.agents)


# --- resume -----------------------------------------------------------------------------------
class _State(msgspec.Struct, kw_only=True):
    """The file `FOLDER.compress.json`: settings and result of the fine-tuning, for `--resume`."""

    settings: dict[str, Any]
    """Settings of the fine-tuning, as the user wrote them."""
    since: float | None
    until: float
    """Limits of the attempts in seconds since the epoch. Without a limit of the user's, `until` is
    the start of the command: a store that grows would give other examples after a restart."""
    tuning: FineTuning | None = None
    """None until the model is written."""


_MEASURING: Final = ("app", "tasks", "runners", "prices", "price_per_hour", "folder")
"""Settings that do not affect the fine-tuning, so that they may change with `--resume`."""


def _open_state(settings: Compression, *, resume: bool) -> tuple[Path, _State]:
    """Return the path and contents of the state, a new one if nothing was begun.

    Raises:
        ConfigError: the folder is in use, or was begun with other settings, or the file is damaged.
    """
    path = _sibling(settings.folder, "compress.json")
    values = {
        f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in _MEASURING
    }
    values |= {"model": local_model(settings.model), "store": public_url(settings.store)}
    values = msgspec.json.decode(msgspec.json.encode(values))  # as in the file
    is_begun = _is_begun(settings.folder)
    if is_begun and path.exists() and resume:
        try:
            state = msgspec.json.decode(path.read_bytes(), type=_State)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} is damaged: {error}; give another --folder") from error
        differing = [key for key, value in values.items() if state.settings.get(key) != value]
        if differing:
            raise ConfigError(
                f"{settings.folder} was begun with other settings ({', '.join(differing)}): give "
                "the same, or another --folder"
            )
        if state.tuning is None or (settings.folder / "config.json").is_file():
            return path, state
    elif is_begun:
        raise ConfigError(
            f"{settings.folder} is in use: add --resume to continue or to measure it, or give "
            "another --folder"
        )
    query = Query.of(settings.service, settings.since, settings.until)
    until = time.time() if query.until is None else query.until
    return path, _State(settings=values, since=query.since, until=until)


def _is_begun(folder: Path) -> bool:
    """Return whether there is something in the folder, or a checkpoint of its fine-tuning."""
    has_files = (not folder.is_dir() and folder.exists()) or any(folder.glob("*"))
    return has_files or _sibling(folder, "unfinished").exists()


def _write(path: Path, state: _State) -> None:
    """Write the state, atomically.

    Raises:
        DataError: the file cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(state))
        part.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}") from error


def _sibling(folder: Path, name: str) -> Path:
    """Return the path of a file or folder in the parent folder, such as `small.measured`."""
    folder = folder.absolute()  # "." has no name
    return folder.with_name(f"{folder.name}.{name}")
