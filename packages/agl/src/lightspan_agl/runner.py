"""`LitAgentRunner`: run an agent task by task for debugging."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from lightspan.errors import ConfigError
from lightspan.lightning.rollout_checks import check_rewards
from lightspan.schema.records import Mode
from lightspan.schema.semconv import REWARD_VALUE
from lightspan.schema.spans import SpanKind, new_span_id
from lightspan_agl._local import local_runs
from lightspan_agl._unsupported import refuse_names as _refuse_names
from lightspan_agl.litagent import LitAgent
from lightspan_agl.store import InMemoryLightningStore
from lightspan_agl.tracer import Tracer
from lightspan_agl.types import NamedResources, Rollout, RolloutMode, check_resources

__all__ = ["LitAgentRunner"]
__getattr__ = _refuse_names(__name__)

T = TypeVar("T")


class LitAgentRunner(Generic[T]):
    """Run an agent task by task in this process, for debugging.

    Args:
        tracer: ignored; lightspan records without a tracer.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._context: tuple[LitAgent[T], InMemoryLightningStore] | None = None

    @contextmanager
    def run_context(
        self, *, agent: LitAgent[T], store: InMemoryLightningStore
    ) -> Iterator[LitAgentRunner[T]]:
        """Set the agent that `step` runs and the store for its spans, within a `with` block."""
        self._context = agent, store
        try:
            yield self
        finally:
            self._context = None

    async def step(
        self, input: T, *, resources: NamedResources | None = None, mode: RolloutMode | None = None
    ) -> Rollout:
        """Run the agent on one task and store its spans.

        Args:
            input: the task.
            resources: the agent's resources; None for none.
            mode: mode of the rollout; None is the same as `train` for the agent.

        Raises:
            ConfigError: `step` was called outside `run_context`.
            RewardError: the agent returned an invalid reward.
        """
        if self._context is None:
            raise ConfigError("call step inside `with runner.run_context(agent=…, store=…):`")
        agent, store = self._context
        start_time = time.time()
        store_mode = Mode.VAL if mode == "val" else Mode.TRAIN
        async with local_runs(agent, check_resources(resources), slots=1) as runs:
            [episode] = await runs.rollouts([input], mode=store_mode)
            spans = list((await runs.store.spans([episode.attempt_id]))[episode.attempt_id])
        check_rewards([episode])
        if episode.reward_source == "returned":
            fields = {"kind": SpanKind.REWARD, "attributes": {REWARD_VALUE: episode.reward}}
            spans.append(
                spans[-1].replace(span_id=new_span_id(), name="lightspan.reward", **fields)
            )
        store.add(episode.rollout_id, spans)
        failed = episode.message or not episode.finished
        return Rollout(
            rollout_id=episode.rollout_id,
            input=input,
            start_time=start_time,
            mode=mode,
            status="failed" if failed else "succeeded",
        )
