"""The settings of a training: what a `Trainer` is given, checked once."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar, cast

from lightspan.algorithms.protocol import Algorithm
from lightspan.errors import ConfigError
from lightspan.plugins import load_plugin
from lightspan.progress import Reporter, default_reporter, plural
from lightspan.protocols.engine import EngineSpec, TokenEngine
from lightspan.protocols.learner import Learner, LearnerSpec
from lightspan.runners.protocol import Runners
from lightspan.schema.records import Json
from lightspan.schema.routing import Route
from lightspan.schema.validation import (
    MAX_S,
    check_choice,
    check_device_name,
    check_number,
    check_whole,
    parse_gateway_address,
)
from lightspan.stores import public_url
from lightspan.training.folder import RunFolder
from lightspan.training.rewards import Scorer, as_scorer
from lightspan.training.sinks import MetricSink, checked_sinks

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

RECORDED: Final = (
    *("steps", "epochs", "validate_every", "validate_temperature", "keep", "patience"),
    *("checkpoint_every", "device", "metric", "cluster"),
)
"""What `config.json` says of a trainer as it was given."""


_LEAST: Final = {
    "steps": 0,
    "checkpoint_every": 1,
    "validate_every": 1,
    "max_frozen_calls": 0,
}
_METHODS: Final = {
    "engine": ("build", "generate"),
    "learner": ("build", "update"),
    "runners": ("start",),
}
"""Part → methods of which a spec or an instance has one."""
_SHOWN_KINDS: Final = {
    "engine": ("Transformers(…)", "VLLM(…)", "an engine", "the name of a plugin", "None"),
    "learner": ("Torch(…)", "Verl(…)", "a learner", "the name of a plugin", "None"),
    "runners": ("a number", "LocalRunners(…)", "runners of your own", "the name of a plugin"),
}
DEFAULT_ENGINE: Final = "transformers"
DEFAULT_LEARNER: Final = "torch"


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The settings of `Trainer`, which describes them.

    Raises:
        ConfigError: a setting that cannot be honoured.
    """

    algorithm: Algorithm = field(kw_only=False)
    runners: int | Runners | str = 8
    steps: int | None = None
    epochs: float = 1.0
    folder: str | Path | None = None
    validate_every: int | None = None
    keep: Literal["last", "best"] = "last"
    patience: int | None = None
    validate_temperature: float | None = None
    checkpoint_every: int = 1
    engine: TokenEngine | EngineSpec | str | None = None
    learner: Learner | LearnerSpec | str | None = None
    store: str | None = None
    device: str = "cpu"
    metric: str = "reward"
    cluster: str | None = None
    max_frozen_calls: int | None = None
    sinks: Sequence[str | MetricSink] = ()
    reporter: Reporter | None = None
    lease_s: float = 30.0
    reward: Scorer | Callable[..., Any] | str | None = None
    gateway: str | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least)
        check_number("epochs", self.epochs, above=0)
        check_number("lease_s", self.lease_s, above=0, high=MAX_S)
        if self.validate_temperature is not None:
            check_number("validate_temperature", self.validate_temperature, low=0)
        self._check_choice_of_step()
        if self.cluster is not None and (not isinstance(self.cluster, str) or not self.cluster):
            raise ConfigError(
                f"cluster={self.cluster!r} must be the name of a key of tasks, or None"
            )
        self._check_policies()
        self._check_parts()
        if self.engine is None or self.learner_spec is not None:
            check_device_name(self.device)
        if self.gateway is not None:
            parse_gateway_address(self.gateway)
        if isinstance(self.engine, str):  # it is an error here, and not when the engine is built
            _ = self.engine_spec
        if self.learner_spec is not None:
            self.learner_spec.check(self.device)
        if self.reward is not None:
            object.__setattr__(self, "reward", as_scorer(self.reward))
        # one name stands for a list of it, and an iterator would be used up by the check
        object.__setattr__(self, "sinks", checked_sinks(self.sinks))
        if self.store is not None:  # a password in it is shown and written nowhere
            object.__setattr__(self, "store", public_url(self.store))

    @property
    def gateway_place(self) -> tuple[str, int]:
        """Interface and port of the gateway; port 0 is a free one."""
        return ("127.0.0.1", 0) if self.gateway is None else parse_gateway_address(self.gateway)

    @cached_property
    def engine_spec(self) -> EngineSpec | None:
        """What builds the engine; None for an engine of the user's own, or without policies."""
        spec: EngineSpec | None = self._spec("engines", self.engine, DEFAULT_ENGINE)
        return spec

    @cached_property
    def learner_spec(self) -> LearnerSpec | None:
        """What builds the learner; None for a learner of the user's own, or without policies."""
        spec: LearnerSpec | None = self._spec("learners", self.learner, DEFAULT_LEARNER)
        return spec

    @property
    def own_engine(self) -> TokenEngine:
        """The engine that was given as such."""
        return cast("TokenEngine", self.engine)

    @property
    def own_learner(self) -> Learner:
        """The learner that was given as such."""
        return cast("Learner", self.learner)

    def _spec(self, kind: str, part: Any, default: str) -> Any:
        if part is None and not self.has_policies:
            return None
        if part is None or isinstance(part, str):
            return load_plugin(kind, part or default)()
        return part if callable(getattr(part, "build", None)) else None

    def _check_parts(self) -> None:
        """Raise `ConfigError` for what cannot be an engine, a learner, or runners."""
        for name, methods in _METHODS.items():
            part = getattr(self, name)
            is_number = isinstance(part, Integral) and not isinstance(part, bool)
            if is_number if name == "runners" else part is None:
                continue
            if isinstance(part, str) and part:
                continue
            is_one = any(callable(getattr(part, method, None)) for method in methods)
            if isinstance(part, type | str | bool) or not is_one:
                kinds = " or ".join(_SHOWN_KINDS[name])
                raise ConfigError(f"{name}={part!r:.80}: give {kinds}")

    def _check_policies(self) -> None:
        """Without policies there are no weights: what is said of them is refused."""
        total = self.algorithm.total_steps
        asked = {"steps": self.steps, "epochs": self.epochs if self.epochs != 1.0 else None}
        for name, value in asked.items():
            if total is not None and value not in (None, total):
                raise ConfigError(
                    f"{name}={value!r}: {self.algorithm.name} knows itself when it has ended "
                    f"({plural(total, 'step')}); leave {name}= out"
                )
        if self.has_policies:
            return
        given = {
            "engine": self.engine,
            "learner": self.learner,
            "device": self.device if self.device != "cpu" else None,
            "validate_temperature": self.validate_temperature,
            "keep": self.keep if self.keep != "last" else None,
        }
        refused = [f"{name}={value!r:.80}" for name, value in given.items() if value is not None]
        if refused:
            raise ConfigError(
                f"{', '.join(refused)}: {self.algorithm.name} trains no policy, so there is "
                "neither an engine nor a learner; leave it out"
            )
        routing = self.algorithm.routing()
        targets = [*(rule.target for rule in routing.rules), routing.default]
        ours = sorted({str(t.route) for t in targets if t.route not in (Route.APP, Route.ENDPOINT)})
        if ours:
            raise ConfigError(
                f"the routing of {self.algorithm.name} sends calls to {' and '.join(ours)}, and it "
                "has no policies: nothing would answer them"
            )

    @property
    def has_policies(self) -> bool:
        """Whether weights are trained. If not, there is neither an engine nor a learner."""
        return bool(self.algorithm.policies())

    def _check_choice_of_step(self) -> None:
        check_choice("keep", self.keep, ("last", "best"))
        if self.patience is not None:
            check_whole("patience", self.patience, 1)
        if self.chooses and self.validate_every is None:
            raise ConfigError(
                f"{self.chooses} compares steps that were evaluated: give validate_every= too, "
                "such as a tenth of the steps"
            )

    @property
    def chooses(self) -> str:
        """The setting by which evaluations on the selection split decide something; empty if none
        does."""
        if self.keep == "best":
            return 'keep="best"'
        return "" if self.patience is None else f"patience={self.patience}"

    @property
    def scorer(self) -> Scorer | None:
        """Who gives rewards in the app's place; None: the app does."""
        return None if self.reward is None else as_scorer(self.reward)

    @cached_property
    def run_folder(self) -> RunFolder:
        """That of the run; a fresh one where none was given."""
        return RunFolder(Path(self.folder) if self.folder is not None else _fresh_folder())

    @cached_property
    def progress(self) -> Reporter:
        """Where progress goes."""
        return self.reporter or default_reporter()

    @property
    def store_url(self) -> str:
        return self.store or self.run_folder.store_url

    def planned_steps(self, tasks: int) -> int:
        """Iterations in all."""
        own = self.algorithm.total_steps
        steps = self.steps if own is None else own
        return planned_steps(steps, self.epochs, tasks, self.algorithm.tasks_per_step)

    def evaluates(self, step: int, total: int, *, selection: bool) -> bool:
        """Whether held-out tasks are run after a step: before training, after it, and every so
        often unless there is a selection split for that."""
        every = None if selection else self.validate_every
        return step in (0, total) or (every is not None and step % every == 0)

    def compares(self, step: int, total: int, *, selection: bool) -> bool:
        """Whether the selection split is run after a step, if there is one."""
        every = self.validate_every
        return selection and every is not None and (step == total or step % every == 0)

    def has_ended(self, step: int, total: int, waited: int) -> bool:
        """Whether training ends with a step.

        Args:
            waited: evaluations on the selection split since the best one.
        """
        return step >= total or (self.patience is not None and waited >= self.patience)

    def config(self) -> dict[str, Json]:
        """For `config.json`."""
        elsewhere = self.store_url != self.run_folder.store_url
        return {
            **self.algorithm.config(),
            **{name: getattr(self, name) for name in RECORDED},
            "store": self.store_url if elsewhere else None,
            "reward": None if self.scorer is None else self.scorer.config(),
        }


def planned_steps(steps: int | None, epochs: float, tasks: int, tasks_per_step: int) -> int:
    """Iterations in all: as many as are asked for, else those of the epochs."""
    return max(1, math.ceil(epochs * tasks / tasks_per_step)) if steps is None else steps


def signature_from(
    settings: Callable[P, S],
) -> Callable[[Callable[[T, S], None]], Callable[Concatenate[T, P], None]]:
    """Gives a constructor the parameters of its settings: they are spelled there alone, and
    callers, type checkers and `help` see them here."""

    def decorate(init: Callable[[T, S], None]) -> Callable[Concatenate[T, P], None]:
        @functools.wraps(init)
        def made(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, settings(*args, **kwargs))

        made.__signature__ = inspect.signature(settings.__init__)  # type: ignore[attr-defined]
        # what a wrong or missing setting is told: the constructor that people call
        settings.__init__.__qualname__ = init.__qualname__
        return made

    return decorate


def _fresh_folder() -> Path:
    """`runs/<date and time>`, with a number if it is taken."""
    stem = datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path
