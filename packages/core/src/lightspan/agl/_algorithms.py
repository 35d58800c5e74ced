"""Algorithms of one's own: what to run and what to learn from it, over a store."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast

from lightspan.agl._adapters import TraceAdapter
from lightspan.agl._resources import NamedResources
from lightspan.agl._rollouts import Dataset, Rollout, RolloutMode
from lightspan.errors import AppError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from lightspan.agl._store import LightningStore
    from lightspan.agl._trainer import Trainer

log = logging.getLogger(__name__)


class Algorithm:
    """Override `run`, sync or async: queue rollouts in the store, wait for them, and learn.

    A `Trainer` gives it what the getters return; so may you, with the setters.
    """

    _trainer: Trainer | None = None
    _store: LightningStore | None = None
    _adapter: TraceAdapter[Any] | None = None
    _llm_proxy: Any = None
    _initial_resources: NamedResources | None = None

    def is_async(self) -> bool:
        """Whether `run` is to be awaited."""
        return inspect.iscoroutinefunction(self.run)

    def set_trainer(self, trainer: Trainer) -> None:
        """See `get_trainer`."""
        self._trainer = trainer

    def get_trainer(self) -> Trainer:
        """The trainer that runs it.

        Raises:
            ConfigError: it was not set.
        """
        return cast("Trainer", _there(self._trainer, "trainer"))

    def set_store(self, store: LightningStore) -> None:
        """See `get_store`."""
        self._store = store

    def get_store(self) -> LightningStore:
        """Where rollouts are queued, and what came of them is found.

        Raises:
            ConfigError: it was not set.
        """
        return cast("LightningStore", _there(self._store, "store"))

    def set_adapter(self, adapter: TraceAdapter[Any]) -> None:
        """See `get_adapter`."""
        self._adapter = adapter

    def get_adapter(self) -> TraceAdapter[Any]:
        """What makes data of spans.

        Raises:
            ConfigError: it was not set.
        """
        return cast("TraceAdapter[Any]", _there(self._adapter, "adapter"))

    def set_llm_proxy(self, llm_proxy: Any) -> None:
        """See `get_llm_proxy`."""
        self._llm_proxy = llm_proxy

    def get_llm_proxy(self) -> Any:
        """None: there is no proxy here, and resources name their endpoints themselves."""
        return self._llm_proxy

    def set_initial_resources(self, resources: NamedResources) -> None:
        """See `get_initial_resources`."""
        self._initial_resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """The resources of `Trainer(initial_resources=)`; None if there are none."""
        return self._initial_resources

    def get_client(self) -> NoReturn:
        """Raises `UnsupportedError`."""
        raise UnsupportedError("get_client: the client of 0.1 is not there; use get_store()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def run(
        self,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> Awaitable[None] | None:
        """The algorithm.

        Raises:
            AppError: a subclass does not override it.
        """
        raise AppError(
            f"{type(self).__qualname__} must define run(self, train_dataset, val_dataset)"
        )


def _there(value: Any, what: str) -> Any:
    if value is None:
        raise ConfigError(f"the algorithm has no {what} yet: a Trainer sets it, or set_{what}(…)")
    return value


class FastAlgorithm(Algorithm):
    """One that is quick enough for `Trainer.dev`."""


_OFFERED: Final = ("store", "adapter", "llm_proxy", "initial_resources")


class FunctionalAlgorithm(Algorithm):
    """A function as an algorithm; it stays callable as it was. Made by `algo`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._asks = inspect.signature(function).parameters

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def run(
        self,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> Awaitable[None] | None:
        """Call the function with what it asks for by name.

        Raises:
            TypeError: a data set that it does not ask for.
        """
        given = {"train_dataset": train_dataset, "val_dataset": val_dataset}
        for name, data in given.items():
            if data is not None and name not in self._asks:
                raise TypeError(f"{name} is given, and the algorithm {self._function} takes none")
        offered: dict[str, Any] = {
            name: getattr(self, f"get_{name}")() for name in _OFFERED if name in self._asks
        }
        asked = {name: data for name, data in given.items() if name in self._asks}
        result = self._function(**offered, **asked)
        return result if self.is_async() else None


def algo(func: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make an algorithm of a function, sync or async, that asks by name for what it needs: `store`,
    `train_dataset`, `val_dataset`, `adapter`, `llm_proxy`, `initial_resources`."""
    return FunctionalAlgorithm(func)


class Baseline(FastAlgorithm):
    """Runs every task, learns nothing, and logs what happened.

    Args:
        n_epochs: how often.
        train_split: accepted; must be between 0 and 1.
        polling_interval: seconds between two looks.
        max_queue_length: rollouts that wait to be taken, at most, before another is queued.
        span_verbosity: of each span: its attributes' names, these and their values, or nothing.

    Raises:
        ConfigError: `train_split` is not between 0 and 1.
    """

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 0.5,
        polling_interval: float = 5.0,
        max_queue_length: int = 4,
        span_verbosity: Literal["keys", "key_values", "none"] = "keys",
    ) -> None:
        if not 0.0 < train_split < 1.0:
            raise ConfigError(f"Baseline(train_split={train_split}) must be between 0 and 1")
        self.n_epochs = n_epochs
        self.train_split = train_split
        self.polling_interval = polling_interval
        self.max_queue_length = max_queue_length
        self.span_verbosity = span_verbosity

    async def run(
        self,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Run every task of both data sets."""
        store = self.get_store()
        resources, resources_id = self.get_initial_resources(), None
        if resources:
            resources_id = (await store.update_resources("default", resources)).resources_id
        for _ in range(self.n_epochs):
            queued: list[str] = []
            datasets: Mapping[RolloutMode, Dataset[Any] | None]
            datasets = {"train": train_dataset, "val": val_dataset}
            for mode, data in datasets.items():
                for number in range(0 if data is None else len(data)):
                    await self._wait_for_room()
                    assert data is not None
                    rollout = await store.enqueue_rollout(
                        data[number],
                        mode=mode,
                        resources_id=resources_id,
                    )
                    queued.append(rollout.rollout_id)
            for rollout in await store.wait_for_rollouts(rollout_ids=queued):
                await self._report(rollout)

    async def _wait_for_room(self) -> None:
        waiting: Final = ("queuing", "requeuing")
        store, most = self.get_store(), self.max_queue_length
        while len(await store.query_rollouts(status_in=waiting)) > most:  # noqa: ASYNC110
            await asyncio.sleep(self.polling_interval)

    async def _report(self, rollout: Rollout) -> None:
        store = self.get_store()
        log.info("rollout %s: %s", rollout.rollout_id, rollout.status)
        for attempt in await store.query_attempts(rollout.rollout_id):
            log.info("attempt %s: %s", attempt.attempt_id, attempt.status)
        spans = await store.query_spans(rollout.rollout_id, "latest")
        if self.span_verbosity != "none":
            for span in spans:
                said = (
                    span.attributes if self.span_verbosity == "key_values" else [*span.attributes]
                )
                log.info("span #%d %s: %s", span.sequence_id, span.name, said)
        if self._adapter is not None:
            log.info("adapted: %s", self._adapter.adapt(list(spans)))
