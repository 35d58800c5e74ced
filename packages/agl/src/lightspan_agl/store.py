"""`InMemoryLightningStore`: rollouts, resources and spans in this process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from lightspan.errors import NotFoundError, UnsupportedError
from lightspan.schema.records import new_id
from lightspan.schema.spans import Span
from lightspan_agl._tasks import TypeChanges, as_task
from lightspan_agl._unsupported import RefusesNames, refuse_names as _refuse_names
from lightspan_agl.types import (
    Attempt,
    AttemptedRollout,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutMode,
    check_mode,
    check_resources,
    copy_resources,
)

__all__ = ["InMemoryLightningStore", "LightningStore"]
__getattr__ = _refuse_names(__name__)

_POLL_INTERVAL_S: Final = 0.05
_NEW_OPTIONS: Final = {"status": "status_in", "rollout_ids": "rollout_id_in"}
"""Old option of `query_rollouts` → the option in its place."""
FINAL: Final = ("succeeded", "failed", "cancelled")
"""Statuses of rollouts that have ended."""


class LightningStore(RefusesNames):
    """Rollouts, resources and spans of algorithms and of `LitAgentRunner`, in this process.

    Args:
        thread_safe: without effect, because threads can always share the store.
        options: other options of Agent Lightning, which are refused.

    Raises:
        UnsupportedError: there are other options.
    """

    def __init__(self, *, thread_safe: bool = False, **options: Any) -> None:
        if options:
            names = ", ".join(f"{name}={value!r:.100}" for name, value in options.items())
            raise UnsupportedError(f"{type(self).__name__}({names}): leave it out")
        self._changes = TypeChanges("input")
        self._spans: dict[str, list[Span]] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._queue: deque[str] = deque()
        self._attempts: dict[str, Attempt] = {}
        """By rollout id; rollouts that wait have none."""
        self._resources: dict[str, ResourcesUpdate] = {}
        """By id, in the order in which the ids were first stored."""
        self._latest = ""
        """Id of the resources that were stored last; empty if there are none."""

    # --- resources ------------------------------------------------------------------------
    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        """Store resources under a new id; from now on they are the latest resources.

        Raises:
            ConfigError: a value is neither an `LLM` nor a `PromptTemplate`.
        """
        return await self.update_resources(new_id("resources"), resources)

    async def update_resources(
        self, resources_id: str, resources: NamedResources
    ) -> ResourcesUpdate:
        """Store resources under an id; from now on they are the latest resources.

        Raises:
            ConfigError: a value is neither an `LLM` nor a `PromptTemplate`.
        """
        checked, now = check_resources(resources, "resources"), time.time()
        before = self._resources.get(resources_id)
        self._resources[resources_id] = ResourcesUpdate(
            resources_id=resources_id,
            resources=checked,
            create_time=now if before is None else before.create_time,
            update_time=now,
            version=1 if before is None else before.version + 1,
        )
        self._latest = resources_id
        return self._resources[resources_id]

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """Return the resources with an id; None if there are none."""
        return self._resources.get(resources_id)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the resources that were stored last; None if there are none."""
        return self._resources.get(self._latest)

    async def query_resources(self, *, resources_id: str | None = None) -> list[ResourcesUpdate]:
        """Return resources in the order in which their ids were first stored.

        Args:
            resources_id: their id; None for any id.
        """
        updates = list(self._resources.values())
        return [r for r in updates if resources_id in (None, r.resources_id)]

    def resources_of(self, rollout_id: str) -> NamedResources:
        """Return a copy of the resources of a rollout, which its agent may change.

        If there were none when the rollout was queued, the resources that were added last are
        returned. The result is empty if there are none.
        """
        update = self._resources.get(self._rollouts[rollout_id].resources_id or self._latest)
        return {} if update is None else copy_resources(update.resources)

    # --- rollouts -------------------------------------------------------------------------
    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Queue a rollout for the runners.

        Args:
            input: the task, of JSON values. Keys of mappings are text.
            mode: mode of the rollout; the agent's `validation_rollout` runs unless it is `train`.
            resources_id: id of the resources of the rollout. None for the latest resources; if
                there are none yet, for those that are the latest when the rollout begins.
            config: None; rollouts are not retried.
            metadata: named values of the rollout, which the agent sees; None for none.

        Raises:
            ConfigError: `mode` is unknown.
            DataError: `input` is not JSON.
            NotFoundError: `resources_id` is unknown.
            UnsupportedError: `config` is not None.
        """
        if config is not None:
            raise UnsupportedError("enqueue_rollout(config=): leave it out; nothing is retried")
        rollout = self._add(input, mode, resources_id, metadata, status="queuing")
        self._queue.append(rollout.rollout_id)
        return rollout

    async def start_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Rollout:
        """Create a rollout with status `running`, which the caller runs instead of a runner.

        The arguments are those of `enqueue_rollout`.
        """
        _refuse_options("start_rollout", options)
        return self._add(input, mode, resources_id, metadata, status="running")

    def _add(
        self,
        input: Any,
        mode: RolloutMode | None,
        resources_id: str | None,
        metadata: Mapping[str, Any] | None,
        status: str,
    ) -> Rollout:
        check_mode(mode)
        if resources_id is None:
            resources_id = self._latest or None
        elif resources_id not in self._resources:
            raise NotFoundError(f"the store has no resources {resources_id!r}: add them first")
        rollout = Rollout(
            rollout_id=new_id("rollout"),
            input=as_task(input, "input", self._changes),
            start_time=time.time(),
            mode=mode,
            status=status,
            resources_id=resources_id,
            metadata=dict(metadata or {}),
        )
        self._rollouts[rollout.rollout_id] = rollout
        return rollout

    async def query_rollouts(
        self,
        *,
        status_in: Collection[str] | None = None,
        rollout_id_in: Collection[str] | None = None,
        **options: Any,
    ) -> list[Rollout]:
        """Return the rollouts with certain statuses and ids, in the order of their creation.

        Args:
            status_in: the statuses; None for any status.
            rollout_id_in: the ids; None for any id.
            options: other options of Agent Lightning, which are refused.

        Raises:
            UnsupportedError: there are other options.
        """
        for old, new in _NEW_OPTIONS.items():
            if old in options:
                raise UnsupportedError(f"query_rollouts({old}=): use {new}=")
        _refuse_options("query_rollouts", options)
        return [
            rollout
            for rollout in list(self._rollouts.values())  # another thread may add rollouts
            if (status_in is None or rollout.status in status_in)
            and (rollout_id_in is None or rollout.rollout_id in rollout_id_in)
        ]

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """Return the rollout with an id; None if there is none."""
        return self._rollouts.get(rollout_id)

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        """Return the attempt of a rollout; empty if the rollout waits or is unknown."""
        return [self._attempts[rollout_id]] if rollout_id in self._attempts else []

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the attempt of a rollout; None if the rollout waits or is unknown."""
        return self._attempts.get(rollout_id)

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[Rollout]:
        """Return those of the rollouts that have ended, in the order of `rollout_ids`.

        Args:
            rollout_ids: ids to wait for. An id that is repeated is returned as often. Unknown ids
                are left out.
            timeout: seconds to wait for all of them at most; None for no limit.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            known = [self._rollouts[name] for name in rollout_ids if name in self._rollouts]
            ended = [rollout for rollout in known if rollout.status in FINAL]
            rest_s = None if end is None else end - time.monotonic()
            if len(ended) == len(known) or (rest_s is not None and rest_s <= 0):
                return ended
            await asyncio.sleep(min(_POLL_INTERVAL_S, rest_s or _POLL_INTERVAL_S))

    async def query_spans(
        self, rollout_id: str, attempt_id: str | None = None, **options: Any
    ) -> list[Span]:
        """Return the spans of a rollout by start time; empty if the rollout is unknown.

        Args:
            rollout_id: id of the rollout.
            attempt_id: id of its attempt; None or `latest` for the only one that it has.
            options: other options of Agent Lightning, which are refused.

        Raises:
            UnsupportedError: there are other options.
        """
        _refuse_options("query_spans", options)
        spans = self._spans.get(rollout_id, [])
        return [span for span in spans if attempt_id in (None, "latest", span.attempt_id)]

    # --- of runners -----------------------------------------------------------------------
    def start_next(self) -> Rollout | None:
        """Return the next queued rollout, which then runs; None if none is queued."""
        if not self._queue:
            return None
        rollout = self._rollouts[self._queue.popleft()]
        rollout.status = "running"
        return rollout

    def start_attempt_of(self, attempt: Attempt) -> None:
        """Store the attempt of a rollout that a runner has begun."""
        rollout_id = attempt.rollout_id
        fields = {**vars(self._rollouts[rollout_id]), "attempt": attempt}
        self._attempts[rollout_id] = attempt
        self._rollouts[rollout_id] = AttemptedRollout(**fields)

    def finish(self, rollout_id: str, status: str, spans: Sequence[Span]) -> None:
        """Store the spans of a rollout that has ended, and set its status."""
        self._spans[rollout_id] = sorted(spans, key=lambda span: span.start_ns)
        for record in (self._rollouts[rollout_id], self._attempts.get(rollout_id)):
            if record is not None:
                record.status, record.end_time = status, time.time()


def _refuse_options(method: str, options: Mapping[str, Any]) -> None:
    if options:
        names = ", ".join(f"{name}={value!r:.100}" for name, value in options.items())
        raise UnsupportedError(f"{method}({names}): leave it out, and filter the list it returns")


class InMemoryLightningStore(LightningStore):
    """A `LightningStore`, under the name that scripts for Agent Lightning use."""
