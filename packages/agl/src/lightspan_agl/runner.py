"""`LitAgentRunner`: run an agent task by task for debugging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from lightspan.errors import ConfigError
from lightspan.progress import print_line
from lightspan.schema.validation import check_whole
from lightspan_agl._hooks import HookCalls, check_hooks
from lightspan_agl._local import local_runs
from lightspan_agl._unsupported import refuse_names as _refuse_names
from lightspan_agl.litagent import LitAgent
from lightspan_agl.store import LightningStore
from lightspan_agl.tracer import Tracer, check_tracer
from lightspan_agl.types import Hook, NamedResources, Rollout, RolloutMode

__all__ = ["LitAgentRunner"]
__getattr__ = _refuse_names(__name__)

T = TypeVar("T")


class LitAgentRunner(Generic[T]):
    """Run an agent task by task in this process, for debugging.

    Args:
        tracer: tracer for hooks and for the agent's attribute `tracer`; None for a new `Tracer`.
        max_rollouts: number of rollouts after which `iter` returns; None for no limit.
        options: further options of Agent Lightning, such as `poll_interval`; without effect, and
            named in a line.

    Raises:
        ConfigError: `max_rollouts` is not a whole number above 0.
        UnsupportedError: the tracer's class overrides a method that lightspan never calls.
    """

    def __init__(
        self, tracer: Tracer | None = None, max_rollouts: int | None = None, **options: Any
    ) -> None:
        if max_rollouts is not None:
            check_whole("max_rollouts", max_rollouts, 1)
        self.max_rollouts = max_rollouts
        self.tracer = check_tracer(tracer, "LitAgentRunner")
        self._context: tuple[LitAgent[T], LightningStore, HookCalls] | None = None
        names = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        if names:
            print_line(f"LitAgentRunner: without effect: {', '.join(names)}")

    @contextmanager
    def run_context(
        self,
        *,
        agent: LitAgent[T],
        store: LightningStore,
        hooks: Sequence[Hook] | Hook | None = None,
        worker_id: int | None = None,
    ) -> Iterator[LitAgentRunner[T]]:
        """Set the agent and the store of this runner, within a `with` block.

        Args:
            agent: the agent.
            store: store from which `iter` takes queued rollouts, and to which spans are written.
            hooks: hooks that are called around each rollout; None for none.
            worker_id: ignored. Agent Lightning prints this number in its log lines.

        Raises:
            UnsupportedError: one of `hooks` is no `Hook`.
        """
        calls = HookCalls(hooks=check_hooks(hooks, "run_context"), tracer=self.tracer, runner=self)
        self._context = agent, store, calls
        try:
            yield self
        finally:
            self._context = None

    async def iter(self, *, event: Any = None) -> None:
        """Run the rollouts that are queued in the store, one at a time.

        It returns after `max_rollouts` rollouts. Without that number it runs until it is cancelled.

        Args:
            event: an event, such as a `threading.Event`; `iter` returns once it is set. None for no
                event.

        Raises:
            ConfigError: `iter` was called outside `run_context`.
            RewardError: the agent returned an invalid reward.
        """
        agent, store, hooks = self._entered("iter")
        async with local_runs(agent, {}, slots=1, hooks=hooks) as runs:
            await runs.serve(store, self.max_rollouts, event)

    async def step(
        self,
        input: T,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: Any = None,
    ) -> Rollout:
        """Run the agent on one task and store its spans.

        Args:
            input: the task, of JSON values (see `enqueue_rollout` of the store).
            resources: the agent's resources; None for the latest of the store, if any.
            mode: mode of the rollout; the agent's `validation_rollout` runs unless it is `train`.
            event: ignored, as in Agent Lightning.

        Returns:
            The rollout. Its status is `failed` if the agent raised an exception, which is logged.

        Raises:
            ConfigError: `step` was called outside `run_context`.
            DataError: `input` is not JSON.
            RewardError: the agent returned an invalid reward.
        """
        agent, store, hooks = self._entered("step")
        resources_id = None
        if resources is not None:
            resources_id = (await store.add_resources(resources)).resources_id
        rollout = await store.start_rollout(input, mode, resources_id)
        async with local_runs(agent, {}, slots=1, hooks=hooks) as runs:
            await runs.run(rollout, store)
        return await store.get_rollout_by_id(rollout.rollout_id) or rollout

    def _entered(self, method: str) -> tuple[LitAgent[T], LightningStore, HookCalls]:
        if self._context is None:
            raise ConfigError(f"call {method} inside `with runner.run_context(agent=…, store=…):`")
        return self._context
