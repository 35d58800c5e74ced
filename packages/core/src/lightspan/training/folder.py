"""The folder of a run: its files and the lock of the process that trains in it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.advantages import Explanation
from lightspan.schema.prompts import LearnedPrompt
from lightspan.training.jsonl_log import append, read, read_bytes, store_errors
from lightspan.training.results import Evaluation
from lightspan.training.rewards import JOURNAL, RewardLine, Scored

T = TypeVar("T")

CONFIG: Final = "config.json"
METRICS: Final = "metrics.jsonl"
RESULT: Final = "result.json"
PROMPTS: Final = "prompts.json"
REWARDS: Final = "rewards"
TAKEN: Final = "taken"
EXPLANATIONS: Final = "explanations"
MISMATCHES: Final = "mismatches"
LOCK: Final = "lock"

EvaluationKind = Literal["eval", "selection"]
"""`kind` of a line of the metrics: `eval` for held-out tasks, `selection` for the selection
split."""
_EVALUATIONS: Final[dict[EvaluationKind, str]] = {"eval": "evaluations", "selection": "selections"}
"""Kind → name of the subfolder with its evaluations."""


class RunFolder:
    """Files of a run, in a folder such as `runs/<name>/` that only its owner can read.

    Args:
        path: path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.path.resolve() / 'store.db'}"

    @property
    def is_used(self) -> bool:
        """Whether the folder contains a run."""
        return (self.path / CONFIG).exists()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def create(self) -> None:
        """Create the folder and lock it against other trainers.

        Raises:
            ConfigError: the folder cannot be written, is used for other things too (such as the
                home folder), or is locked by another trainer.
        """
        if _is_shared(self.path):
            raise ConfigError(
                f"{self.path} holds more than a run, and a run's folder is closed to other users: "
                "give the run a new folder (folder=), such as runs/first"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            lock = (self.path / LOCK).open("a+")
            self.checkpoints.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"the run's folder {self.path} cannot be written: {error.strerror}; "
                "give another one (folder=)"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise ConfigError(
                f"another process (pid {owner}) trains in {self.path}: wait for it, or give "
                "another folder (folder=)"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- settings and result --------------------------------------------------------------
    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the run's settings to `config.json`.

        Raises:
            StoreError: the file cannot be written.
        """
        self.write(CONFIG, json.dumps(config, indent=2, default=str).encode() + b"\n")

    def read_config(self) -> dict[str, Any]:
        """Return the run's settings from `config.json`.

        Raises:
            ConfigError: the folder holds no run, or `config.json` is damaged.
        """
        path = self.path / CONFIG
        data = read_bytes(path)
        if data is None:
            raise ConfigError(f"{self.path} is no run of lightspan: it has no {CONFIG}")
        try:
            config = json.loads(data)
        except ValueError as error:
            raise ConfigError(f"{path} is damaged, it is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path} is damaged: it holds no JSON object")
        return config

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, which marks the run as complete; NaN becomes null."""
        self.write(RESULT, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")

    def delete_result(self) -> None:
        """Delete `result.json`, so that the run counts as incomplete while its model changes."""
        with store_errors(self.path / RESULT):
            (self.path / RESULT).unlink(missing_ok=True)

    def read_result(self) -> dict[str, Any] | None:
        """Return the content of `result.json`; None while the run is incomplete.

        Raises:
            ConfigError: `result.json` is damaged.
        """
        if self._decode(RESULT, _Result) is None:
            return None
        return self._decode(RESULT, dict[str, Any])

    def write(self, name: str, data: bytes) -> None:
        """Replace the file `name` of the folder atomically.

        Raises:
            StoreError: the file cannot be written; its previous content is untouched.
        """
        target = self.path / name
        with store_errors(target):
            target.parent.mkdir(exist_ok=True, mode=0o700)
            temporary = target.with_name(f".{target.name}")
            temporary.write_bytes(data)
            temporary.replace(target)

    def write_prompts(self, prompts: Mapping[str, LearnedPrompt]) -> None:
        """Write the learned prompts to `prompts.json`; write nothing if there are none."""
        if prompts:
            self.write(PROMPTS, msgspec.json.format(msgspec.json.encode(prompts), indent=2) + b"\n")

    def prompts(self) -> dict[str, LearnedPrompt]:
        """Return the learned prompts by name; empty if the run has none.

        Raises:
            ConfigError: `prompts.json` is damaged.
        """
        return self._decode(PROMPTS, dict[str, LearnedPrompt]) or {}

    # --- metrics --------------------------------------------------------------------------
    def add_metrics(self, line: Mapping[str, Any]) -> None:
        """Append a line to `metrics.jsonl`.

        Raises:
            StoreError: the file cannot be written.
        """
        append(self.path / METRICS, [line])

    def metrics(self) -> list[dict[str, Any]]:
        """Return the complete lines of `metrics.jsonl`.

        Raises:
            ConfigError: a line is damaged.
        """
        read(self.path / METRICS, _MetricsLine)  # checks the fields that every line has
        return read(self.path / METRICS, dict[str, Any])

    def add_evaluation(self, evaluation: Evaluation, line: Mapping[str, Any]) -> None:
        """Store an evaluation and append its line to `metrics.jsonl`.

        The rewards are written before the line. If the line exists, the evaluation is complete.

        Args:
            evaluation: evaluation with the rewards.
            line: line of `metrics.jsonl`, with `kind` and `step`.
        """
        name = _step_file(_EVALUATIONS[line["kind"]], evaluation.step)
        self.write(name, msgspec.json.encode(evaluation))
        self.add_metrics(line)

    def delete_unscored(self, step: int) -> None:
        """Delete the lines of evaluations of `step` without any reward, which are done again."""
        self._write_metrics(
            line
            for line in self.metrics()
            if (line["step"], line.get("n")) != (step, 0) or line["kind"] not in _EVALUATIONS
        )

    def _write_metrics(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self.write(METRICS, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def evaluations(self, kind: EvaluationKind = "eval") -> list[Evaluation]:
        """Return the complete evaluations of a kind, ordered by step.

        Raises:
            ConfigError: a file is damaged.
        """
        steps = sorted({line["step"] for line in self.metrics() if line["kind"] == kind})
        names = [_step_file(_EVALUATIONS[kind], step) for step in steps]
        evaluations = [self._decode(name, Evaluation) for name in names]
        return [evaluation for evaluation in evaluations if evaluation is not None]

    # --- what a step trained ----------------------------------------------------------------
    def write_explanations(self, step: int, explained: Iterable[tuple[str, Explanation]]) -> None:
        """Store the advantage and weight of each trained call of a step, with their reasons.

        Args:
            step: number of the step.
            explained: pairs of a call's name, `attempt/call/choice`, and the explanation.
        """
        self.write(_step_file(EXPLANATIONS, step), msgspec.json.encode(dict(explained)))

    def explanations(self, step: int) -> dict[str, Explanation]:
        """Return the advantage and weight of each trained call of a step; empty if it has none.

        The keys name the calls: `attempt/call/choice`.
        """
        return self._decode(_step_file(EXPLANATIONS, step), dict[str, Explanation]) or {}

    def write_taken(self, step: int, groups: Sequence[str]) -> None:
        """Store which groups of rollouts a step trained.

        This is needed only if groups were enqueued ahead by `submit`. A step may then train groups
        that an earlier step enqueued.
        """
        self.write(_step_file(TAKEN, step), msgspec.json.encode(groups))

    def write_mismatches(self, step: int, mismatches: Mapping[str, str]) -> None:
        """Store the model calls of a step that could not be trained because of their grammar.

        The grammar of a call constrains its answer. The learner cannot use the grammar if another
        library compiled it, or if it does not allow the sampled tokens.

        Args:
            step: number of the step.
            mismatches: name of a call, `attempt/call/choice` → reason.
        """
        self.write(_step_file(MISMATCHES, step), msgspec.json.encode(mismatches))

    def mismatches(self, step: int) -> dict[str, str]:
        """Return the model calls of a step that could not be trained because of their grammar.

        The result maps the name of a call, `attempt/call/choice`, to the reason. It is empty if
        there are none.
        """
        return self._decode(_step_file(MISMATCHES, step), dict[str, str]) or {}

    def _decode(self, name: str, kind: type[T]) -> T | None:
        """Return the content of the file `name` as `kind`; None if the file does not exist.

        Raises:
            ConfigError: the file is damaged or cannot be read.
        """
        path = self.path / name
        data = read_bytes(path)
        try:
            return None if data is None else msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is damaged: {error}; restore a copy or delete it") from error

    # --- rewards of scorers -----------------------------------------------------------------
    def add_rewards(self, name: str, rewards: Mapping[str, Scored]) -> None:
        """Append scores of rollouts to the file of a reward; the last score of a rollout counts.

        Args:
            name: name of the judge's or function's reward.
            rewards: rollout id → score.

        Raises:
            StoreError: the file cannot be written.
        """
        lines = [
            RewardLine(rollout_id=key, **msgspec.structs.asdict(scored))
            for key, scored in rewards.items()
        ]
        append(self._reward_file(name), lines)

    def rewards(self, name: str) -> dict[str, Scored]:
        """Return the scores by the reward `name`; empty if the run has no such reward.

        The keys are rollout ids.

        Raises:
            ConfigError: the reward's file is damaged, or `name` is not a plain file name.
        """
        return {line.rollout_id: line for line in read(self._reward_file(name), RewardLine)}

    def _reward_file(self, name: str) -> Path:
        # A name from an untrusted config.json could lead out of the folder.
        if Path(name).name != name:
            raise ConfigError(f"{self.path}: a reward cannot be called {name!r}")
        return self.path / REWARDS / f"{name}.jsonl"

    def rewind(self, step: int) -> None:
        """Delete the metrics and files of all steps after `step`, to resume from its checkpoint.

        Args:
            step: step of the checkpoint; -1 for a new run. Then the prompts, the rewards and the
                log of a prompt search of an earlier run are deleted too.
        """
        self._write_metrics(line for line in self.metrics() if line["step"] <= step)
        if step < 0:  # the folder may hold files of another run
            (self.path / PROMPTS).unlink(missing_ok=True)
            for name in (JOURNAL, REWARDS):
                shutil.rmtree(self.path / name, ignore_errors=True)
        for name in (*_EVALUATIONS.values(), EXPLANATIONS, MISMATCHES, TAKEN):
            for path in (self.path / name).glob("step-*.json"):
                if int(path.stem.removeprefix("step-")) > step:
                    path.unlink()


class _MetricsLine(msgspec.Struct):
    """The fields that every line of `metrics.jsonl` has."""

    kind: str
    step: int


class _KeptStep(msgspec.Struct):
    step: int


class _Result(msgspec.Struct):
    """The fields that every `result.json` has."""

    steps: int
    seconds: dict[str, float] = {}
    kept: _KeptStep | None = None


def _is_shared(path: Path) -> bool:
    """Return whether the folder is used for other things than a run.

    It is if it contains the working folder or the home folder, or if it has the sticky bit, as
    `/tmp` has.
    """
    folder = path.resolve()
    home = Path(os.path.expanduser("~"))  # stays "~" where there is no home, as in a container
    if any(place.is_relative_to(folder) for place in (Path.cwd(), home)):
        return True
    return folder.is_dir() and bool(folder.stat().st_mode & stat.S_ISVTX)


def _step_file(folder: str, step: int) -> str:
    return f"{folder}/step-{step:06d}.json"
