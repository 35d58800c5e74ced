"""The folder of a run: what lies where, and who may write."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar

import msgspec

from lightspan.errors import ConfigError, StoreError
from lightspan.lightning.advantages import Explanation
from lightspan.schema.prompts import LearnedPrompt
from lightspan.training.jsonl_log import append, read
from lightspan.training.results import Evaluation
from lightspan.training.rewards import Kept, Scored

T = TypeVar("T")

CONFIG: Final = "config.json"
METRICS: Final = "metrics.jsonl"
RESULT: Final = "result.json"
PROMPTS: Final = "prompts.json"
JOURNAL: Final = "journal"
REWARDS: Final = "rewards"
TAKEN: Final = "taken"
LOCK: Final = "lock"

EvaluationKind = Literal["eval", "selection"]
"""`kind` of a line of the metrics: on held-out tasks, or on the selection split."""
_EVALUATIONS: Final[Mapping[EvaluationKind, str]] = {
    "eval": "evaluations",
    "selection": "selections",
}


class RunFolder:
    """`runs/<name>/`, readable by its owner alone.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.path.resolve() / 'store.db'}"

    @property
    def is_used(self) -> bool:
        """Whether a run began here."""
        return (self.path / CONFIG).exists()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def curve(self) -> Path:
        return self.path / "learning_curve.png"

    def create(self) -> None:
        """Make the folder and keep others from training in it.

        Raises:
            ConfigError: it cannot be written, is not for one run alone, or another trainer works
                in it.
        """
        if _shared(self.path):
            raise ConfigError(
                f"{self.path} is not for one run alone, and a run's folder is closed to others: "
                "give the run one of its own (folder=), such as runs/first"
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
        """Let others train here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- settings and result --------------------------------------------------------------
    def write_config(self, config: Mapping[str, Any]) -> None:
        """The settings, as JSON."""
        self.write(CONFIG, json.dumps(config, indent=2, default=str).encode() + b"\n")

    def read_config(self) -> dict[str, Any]:
        """Raises `ConfigError` if this is no run's folder, or the file is damaged."""
        return self._read_json(CONFIG)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """What the complete run gave."""
        self.write(RESULT, json.dumps(result, indent=2).encode() + b"\n")

    def forget_result(self) -> None:
        """The run is not complete any more: its model is about to change."""
        with _written(self.path / RESULT):
            (self.path / RESULT).unlink(missing_ok=True)

    def read_result(self) -> dict[str, Any] | None:
        """None while the run is not complete. Raises `ConfigError` if the file is damaged."""
        path = self.path / RESULT
        if not path.exists():
            return None
        result = self._read_json(RESULT)
        try:
            msgspec.convert(result, _Result)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{path} is damaged: {error}; delete it, and resume=True (--resume) writes it anew"
            ) from error
        return result

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            value = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(f"{self.path} is no run of lightspan: it has no {name}") from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is damaged, it is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{path} is damaged: it holds {type(value).__name__}, no JSON object")
        return value

    def write(self, name: str, data: bytes) -> None:
        """Replace a file as a whole.

        Raises:
            StoreError: it cannot be written; what was there is untouched.
        """
        target = self.path / name
        with _written(target):
            target.parent.mkdir(exist_ok=True, mode=0o700)
            temporary = target.with_name(f".{target.name}")
            temporary.write_bytes(data)
            temporary.replace(target)

    def write_prompts(self, prompts: Mapping[str, LearnedPrompt]) -> None:
        """The prompts that were learned; nothing where none was to be."""
        if prompts:
            self.write(PROMPTS, msgspec.json.format(msgspec.json.encode(prompts), indent=2) + b"\n")

    def prompts(self) -> dict[str, LearnedPrompt]:
        """Raises `ConfigError` if the file is damaged."""
        return self._decoded(PROMPTS, dict[str, LearnedPrompt]) or {}

    # --- metrics --------------------------------------------------------------------------
    def add_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`. Raises `StoreError` if it cannot be written."""
        path = self.path / METRICS
        with _written(path), path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Every complete line of `metrics.jsonl`.

        Raises:
            ConfigError: such a line is damaged.
        """
        path = self.path / METRICS
        data = _read(path)
        lines = (data or b"").split(b"\n")[:-1]  # a process killed while writing leaves a rest
        decoded: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            try:
                msgspec.json.decode(line, type=_Line)
                decoded.append(msgspec.json.decode(line, type=dict[str, Any]))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{path} is damaged in line {number}: {error}; mend or delete the line"
                ) from error
        return decoded

    def add_evaluation(self, evaluation: Evaluation, line: Mapping[str, Any]) -> None:
        """Keep an evaluation: the rewards, then the line that says that it is complete."""
        path = _evaluation(evaluation.step, line["kind"])
        self.write(path, msgspec.json.encode(evaluation))
        self.add_metrics(line)

    def evaluations(self, kind: EvaluationKind = "eval") -> list[Evaluation]:
        """The complete evaluations, by step: on held-out tasks, or on the selection split."""
        steps = sorted({line["step"] for line in self.metrics() if line["kind"] == kind})
        evaluations = [self._decoded(_evaluation(step, kind), Evaluation) for step in steps]
        return [each for each in evaluations if each is not None]

    # --- what the learner was told --------------------------------------------------------
    def write_explanations(
        self, step: int, explanations: Iterable[tuple[str, Explanation]]
    ) -> None:
        """Keep why each transition of a step had its advantage and weight."""
        self.write(_explanations(step), msgspec.json.encode(dict(explanations)))

    def explanations(self, step: int) -> dict[str, Explanation]:
        """`attempt/call/choice` → explanation; empty where none was kept."""
        return self._decoded(_explanations(step), dict[str, Explanation]) or {}

    def is_explained(self, step: int) -> bool:
        """Whether a step said what it learned from, be it nothing."""
        return (self.path / _explanations(step)).exists()

    def write_taken(self, step: int, groups: Sequence[str]) -> None:
        """Keep which groups a step trained, of those that were begun before it."""
        self.write(_taken(step), msgspec.json.encode(groups))

    def taken(self) -> dict[str, int]:
        """Group → the step that trained it; empty where each step trains the groups that it begins.

        Raises:
            ConfigError: a file is damaged.
        """
        steps = sorted(map(_step_of, (self.path / TAKEN).glob("step-*.json")))
        return {group: s for s in steps for group in self._decoded(_taken(s), list[str]) or ()}

    def write_mismatches(self, step: int, mismatches: Mapping[str, str]) -> None:
        """Keep why the learner could not compute calls of a step under their grammar."""
        self.write(_mismatches(step), msgspec.json.encode(mismatches))

    def mismatches(self, step: int) -> dict[str, str]:
        """`attempt/call/choice` → why; empty where none was kept."""
        return self._decoded(_mismatches(step), dict[str, str]) or {}

    def _decoded(self, name: str, kind: type[T]) -> T | None:
        """What a file says; None where there is none."""
        path = self.path / name
        data = _read(path)
        try:
            return None if data is None else msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} is damaged: {error}; restore a copy, or delete it"
            ) from error

    # --- rewards from elsewhere than the app ------------------------------------------------
    def add_rewards(self, name: str, rewards: Mapping[str, Scored]) -> None:
        """Keep what rollouts are worth under a reward; the last that was said of one counts.

        Args:
            rewards: by rollout id.

        Raises:
            StoreError: they cannot be written.
        """
        append(self._rewards(name), [_kept(key, scored) for key, scored in rewards.items()])

    def rewards(self, name: str) -> dict[str, Scored]:
        """Rollout id → what it is worth under the reward; empty if the run has none of this name.

        Raises:
            ConfigError: the file is damaged.
        """
        return {each.rollout_id: each for each in read(self._rewards(name), Kept)}

    def reward_names(self) -> list[str]:
        """The rewards that the run has beside the app's own."""
        return sorted(path.stem for path in (self.path / REWARDS).glob("*.jsonl"))

    def _rewards(self, name: str) -> Path:
        if Path(name).name != name:  # it may stand in a file of somebody else's
            raise ConfigError(f"{self.path}: a reward cannot be called {name!r}")
        return self.path / REWARDS / f"{name}.jsonl"

    def rewind(self, step: int) -> None:
        """Forget what came after a checkpoint: it did not happen. -1 forgets everything."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        self.write(METRICS, b"".join(msgspec.json.encode(line) + b"\n" for line in kept))
        if step < 0:  # another run was here
            (self.path / PROMPTS).unlink(missing_ok=True)
            for name in (JOURNAL, REWARDS):
                shutil.rmtree(self.path / name, ignore_errors=True)
        for name in (*_EVALUATIONS.values(), "explanations", "mismatches", TAKEN):
            for path in (self.path / name).glob("step-*.json"):
                if _step_of(path) > step:
                    path.unlink()


class _Line(msgspec.Struct):
    """What every line of `metrics.jsonl` has."""

    kind: str
    step: int


class _KeptStep(msgspec.Struct):
    step: int


class _Result(msgspec.Struct):
    """What every `result.json` has."""

    steps: int
    seconds: dict[str, float] = {}
    kept: _KeptStep | None = None


def _kept(rollout_id: str, scored: Scored) -> Kept:
    fields = {name: getattr(scored, name) for name in ("value", "dimensions", "why", "reasons")}
    return Kept(rollout_id=rollout_id, **fields)


def _read(path: Path) -> bytes | None:
    """What is in the file; None where there is none. Raises `ConfigError` if it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Say which file could not be written."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror}; see to its disk and its permissions, "
            "then go on with resume=True (--resume)"
        ) from error


def _shared(path: Path) -> bool:
    """Whether closing this folder to others would close more than a run."""
    whole = path.resolve()
    home = Path(os.path.expanduser("~"))  # as it is where nobody has a home, as in a container
    if any(place.is_relative_to(whole) for place in (Path.cwd(), home)):
        return True
    return whole.is_dir() and bool(whole.stat().st_mode & stat.S_ISVTX)


def _evaluation(step: int, kind: EvaluationKind) -> str:
    return f"{_EVALUATIONS[kind]}/step-{step:06d}.json"


def _explanations(step: int) -> str:
    return f"explanations/step-{step:06d}.json"


def _taken(step: int) -> str:
    return f"{TAKEN}/step-{step:06d}.json"


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _mismatches(step: int) -> str:
    return f"mismatches/step-{step:06d}.json"
