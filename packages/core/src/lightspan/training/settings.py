"""The validated settings of a `Trainer`."""

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
from lightspan.errors import ConfigError, how_to_install
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.progress import Reporter, default_reporter, plural
from lightspan.protocols.engine import EngineSpec, TokenEngine
from lightspan.protocols.learner import Learner, LearnerSpec
from lightspan.runners.protocol import Runners
from lightspan.schema import validation
from lightspan.schema.records import Json
from lightspan.schema.routing import Route
from lightspan.stores import is_shared, open_store, public_url
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
"""Settings that `config.json` contains with unchanged values."""

_MIN_VALUES: Final = {
    **dict.fromkeys(("steps", "max_frozen_calls"), 0),
    **dict.fromkeys(("checkpoint_every", "validate_every", "patience"), 1),
}
_PARTS: Final = {
    "engine": (("build", "generate"), "Transformers(…) or VLLM(…) or an engine"),
    "learner": (("build", "update"), "Torch(…) or Verl(…) or a learner"),
    "runners": (("start",), "a number or LocalRunners(…) or runners of your own"),
}
"""Setting → (names of methods, text on accepted values). A valid object has one of the methods."""
DEFAULT_ENGINE: Final = "transformers"
DEFAULT_LEARNER: Final = "torch"


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The settings of `Trainer`, which documents them.

    Raises:
        ConfigError: a setting is invalid or contradicts another.
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
    patience_s: float = 3600.0
    reward: Scorer | Callable[..., Any] | str | None = None
    gateway: str | None = None
    image_hosts: Sequence[str] = ()
    ui: bool | int = False

    def __post_init__(self) -> None:
        for name, minimum in _MIN_VALUES.items():
            validation.check_whole(name, getattr(self, name), minimum, optional=True)
        validation.check_choice("keep", self.keep, ("last", "best"))
        validation.check_number("epochs", self.epochs, above=0)
        validation.check_number("lease_s", self.lease_s, above=0, high=validation.MAX_S)
        validation.check_number("patience_s", self.patience_s, low=0, high=validation.MAX_S)
        temperature = self.validate_temperature
        validation.check_number("validate_temperature", temperature, low=0, optional=True)
        if self.selection_setting and self.validate_every is None:
            raise ConfigError(
                f"{self.selection_setting} compares steps that were evaluated: give "
                "validate_every= too, such as a tenth of the steps"
            )
        if self.cluster is not None and (not isinstance(self.cluster, str) or not self.cluster):
            raise ConfigError(f"cluster={self.cluster!r} must be a key of tasks, or None")
        self._check_policies()
        self._check_parts()
        if self.engine is None or self.learner_spec is not None:
            validation.check_device_name(self.device)
        if self.gateway is not None:
            validation.parse_gateway_address(self.gateway)
        if isinstance(self.engine, str):
            _ = self.engine_spec  # raises for an unknown plugin
        if self.learner_spec is not None:
            self.learner_spec.check(self.device)
        if self.reward is not None:
            object.__setattr__(self, "reward", as_scorer(self.reward))
        object.__setattr__(self, "sinks", (*checked_sinks(self.sinks), *self._page()))
        if self.store is not None:  # without its password, which must not be shown or written
            url = public_url(self.store)
            # `inspect` may run in another folder, so the path of a file is made absolute
            object.__setattr__(self, "store", url if is_shared(url) else open_store(url).url)

    def _page(self) -> list[MetricSink]:
        """Return the sink that serves the page of the run; none if `ui` is False."""
        if (is_missing := "ui" not in installed_plugins("sinks")) and self.ui is not False:
            self.progress.line(f"ui={self.ui}: no page is shown without {how_to_install('ui')}")
        is_shown = self.ui is not False and not is_missing
        return [load_plugin("sinks", "ui")(self.ui, self.progress.line)] if is_shown else []

    @cached_property
    def engine_spec(self) -> EngineSpec | None:
        """Configuration from which the engine is built.

        None if `engine` is an engine itself, or if the algorithm trains no weights.
        """
        return cast("EngineSpec | None", self._spec("engines", self.engine, DEFAULT_ENGINE))

    @cached_property
    def learner_spec(self) -> LearnerSpec | None:
        """Configuration from which the learner is built.

        None if `learner` is a learner itself, or if the algorithm trains no weights.
        """
        return cast("LearnerSpec | None", self._spec("learners", self.learner, DEFAULT_LEARNER))

    def _spec(self, kind: str, part: Any, default: str) -> Any:
        if part is None and not self.has_policies:
            return None
        if part is None or isinstance(part, str):
            return load_plugin(kind, part or default)()
        return part if callable(getattr(part, "build", None)) else None

    def _check_parts(self) -> None:
        """Raise `ConfigError` unless engine, learner and runners have an accepted type."""
        for name, (methods, accepted) in _PARTS.items():
            part, is_count = getattr(self, name), name == "runners"
            is_number = isinstance(part, Integral) and not isinstance(part, bool)
            if is_number if is_count else part is None:
                continue
            if isinstance(part, str) and part:
                continue
            has_method = any(callable(getattr(part, method, None)) for method in methods)
            if isinstance(part, type | str | bool) or not has_method:
                none = "" if is_count else " or None"
                raise ConfigError(f"{name}={part!r:.80}: give {accepted} or a plugin's name{none}")

    def _check_policies(self) -> None:
        """Raise `ConfigError` for settings that contradict the algorithm's steps or policies."""
        total = self.algorithm.total_steps
        lengths = {"steps": self.steps, "epochs": self.epochs if self.epochs != 1.0 else None}
        for name, value in lengths.items():
            if total is not None and value not in (None, total):
                raise ConfigError(
                    f"{name}={value!r}: {self.algorithm.name} sets its own number of steps "
                    f"({plural(total, 'step')}); leave {name}= out"
                )
        if self.steps is not None and self.epochs != 1.0:
            raise ConfigError(f"epochs={self.epochs} has no effect with steps=: give one of them")
        if self.has_policies:
            return
        weights_only = {
            "engine": self.engine,
            "learner": self.learner,
            "device": self.device if self.device != "cpu" else None,
            "validate_temperature": self.validate_temperature,
            "keep": self.keep if self.keep != "last" else None,
        }
        refused = [f"{k}={value!r:.80}" for k, value in weights_only.items() if value is not None]
        if refused:
            raise ConfigError(
                f"{', '.join(refused)}: {self.algorithm.name} trains no policy, so there is "
                "neither an engine nor a learner; leave it out"
            )
        routes = {target.route for target in self.algorithm.routing().targets}
        ours = sorted(str(route) for route in routes - {Route.APP, Route.ENDPOINT})
        if ours:
            raise ConfigError(
                f"the routing of {self.algorithm.name} sends calls to {' and '.join(ours)}, and it "
                "has no policies: nothing would answer them"
            )

    @property
    def has_policies(self) -> bool:
        """Whether the algorithm trains weights; if not, there is no engine and no learner."""
        return bool(self.algorithm.policies())

    @property
    def selection_setting(self) -> str:
        """Text of the setting that needs a selection split, for error messages.

        It is `keep="best"`, or `patience=` with its value; empty if neither is set.
        """
        if self.keep == "best":
            return 'keep="best"'
        return "" if self.patience is None else f"patience={self.patience}"

    @property
    def scorer(self) -> Scorer | None:
        """The judge or function that gives rewards; None if the app gives them."""
        return None if self.reward is None else as_scorer(self.reward)

    @cached_property
    def run_folder(self) -> RunFolder:
        """The folder of the run; a new one if `folder` is None."""
        return RunFolder(Path(self.folder) if self.folder is not None else _fresh_folder())

    @cached_property
    def progress(self) -> Reporter:
        """The reporter of progress."""
        return self.reporter or default_reporter()

    @property
    def store_url(self) -> str:
        return self.store or self.run_folder.store_url

    def planned_steps(self, tasks: int) -> int:
        """Return the number of iterations of a run with `tasks` training tasks.

        It is the algorithm's `total_steps` if set, otherwise `steps` if set, otherwise the number
        of steps that `epochs` takes.
        """
        own = self.algorithm.total_steps
        steps = self.steps if own is None else own
        if steps is not None:
            return steps
        return max(1, math.ceil(self.epochs * tasks / self.algorithm.tasks_per_step))

    def evaluates_at(self, step: int, total: int, *, has_selection: bool) -> bool:
        """Return whether held-out tasks are evaluated after `step`.

        They are evaluated before and after training, and every `validate_every` steps unless there
        is a selection split.

        Args:
            step: number of the step; 0 before training. It is above `total` in a run that is
                resumed with fewer steps than it has done.
            total: number of planned steps.
            has_selection: whether there is a selection split.
        """
        every = None if has_selection else self.validate_every
        return step == 0 or step >= total or (every is not None and step % every == 0)

    def selects_at(self, step: int, total: int) -> bool:
        """Return whether a selection split is evaluated after `step` of `total` planned steps."""
        every = self.validate_every
        return every is not None and (step >= total or step % every == 0)

    def has_ended(self, step: int, total: int, since_best: int) -> bool:
        """Return whether training ends after `step`: it is the last, or `patience` is used up.

        Args:
            step: number of the step.
            total: number of planned steps.
            since_best: number of evaluations on the selection split after the best evaluation.
        """
        return step >= total or (self.patience is not None and since_best >= self.patience)

    def config(self) -> dict[str, Json]:
        """Return the settings for `config.json`."""
        has_own_store = self.store_url != self.run_folder.store_url
        return {
            **self.algorithm.config(),
            **{name: getattr(self, name) for name in RECORDED},
            "store": self.store_url if has_own_store else None,
            "reward": None if self.scorer is None else self.scorer.config(),
        }


def signature_from(
    settings: Callable[P, S],
) -> Callable[[Callable[[T, S], None]], Callable[Concatenate[T, P], None]]:
    """Return a decorator that gives a constructor the parameters of a settings class.

    The decorated constructor gets one `settings` object. Callers, type checkers and `help` see the
    parameters of the settings class instead.
    """

    def decorate(init: Callable[[T, S], None]) -> Callable[Concatenate[T, P], None]:
        @functools.wraps(init)
        def wrapper(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, settings(*args, **kwargs))

        wrapper.__signature__ = inspect.signature(settings.__init__)  # type: ignore[attr-defined]
        # Errors about wrong or missing settings name the constructor that users call.
        settings.__init__.__qualname__ = init.__qualname__
        return wrapper

    return decorate


def _fresh_folder() -> Path:
    """Return `runs/<date and time>`, with a number appended if this path exists."""
    stem = datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path
