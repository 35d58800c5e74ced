"""The access policy of `lightspan serve --candidate`: each attempt is answered by one side.

The calls of each side have a session of their own, with the routing of the side. The name of the
model in an answer shows the weights, so every record of the call has it, whatever program records.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from lightspan.errors import ConfigError
from lightspan.schema.genai_messages import output_messages_of
from lightspan.schema.llm import LLM
from lightspan.schema.routing import BASE_POLICY, Route, Routing, Rule, Target
from lightspan.schema.token_records import CallOutcome
from lightspan.training.manifest import ServedRun
from lightspan_gateway.calls import CallerSession, ServedCall
from lightspan_gateway.dialects.openai_responses import ID_PREFIX
from lightspan_gateway.request_body import Body, to_thread_if_large
from lightspan_gateway.serving.candidate.sides import (
    Mark,
    Side,
    attempt_key,
    conversation_keys,
    earlier_keys,
    user_key,
)
from lightspan_gateway.serving.candidate.state import Assignment, CandidateState, Comparison
from lightspan_gateway.serving.public_access import PublicAccess, UsageCounter, shared_session

log: Final = logging.getLogger(__name__)

PREFIX: Final = "candidate/"
"""Beginning of the candidate's policies in the engine."""
MAX_ATTEMPTS: Final = 10_000
"""Maximum number of attempts whose weights are kept in memory; those of others are in the file."""
_T = TypeVar("_T")


# --- routing --------------------------------------------------------------------------------
def candidate_routing(candidate: ServedRun, policies: Collection[str], base: str) -> Routing:
    """Return the candidate's routing, by the names that its policies have in the engine.

    Args:
        candidate: description of the candidate's run or model.
        policies: names of the engine's policies.
        base: name of the candidate's starting weights in the engine.
    """

    def renamed(target: Target) -> Target:
        if target.route is Route.BASE:
            if base == BASE_POLICY:
                return target
            return msgspec.structs.replace(target, route=Route.SHARED, policy=base)
        policy = PREFIX + target.policy
        return msgspec.structs.replace(target, policy=policy) if policy in policies else target

    routing = candidate.routing
    return Routing(
        rules=[Rule(rule.pattern, renamed(rule.target)) for rule in routing.rules],
        default=renamed(routing.default),
    )


def counterparts(current: ServedRun, candidate: ServedRun) -> dict[str, str]:
    """Return the policies that apps may name: name → the candidate's policy.

    Raises:
        ConfigError: a policy has no counterpart, or the candidate does not answer an agent that the
            current weights answer.
    """
    only = [*candidate.policies] if len(candidate.policies) == 1 == len(current.policies) else []
    names: dict[str, str] = {}
    for name in current.policies:
        match = [name] if name in candidate.policies else only
        if not match:
            raise ConfigError(
                f"the candidate has no policy {name!r}, which apps may name: it has "
                f"{', '.join(sorted(candidate.policies))}. Train the candidate with the same names"
            )
        names[name] = match[0]
    patterns = [rule.pattern for rule in current.routing.rules]
    for pattern, target in zip([*patterns, "other agents"], current.routing.targets, strict=True):
        answer = candidate.routing.default if pattern == "other agents" else None
        answer = answer or candidate.routing.target(pattern)
        if target.route is not Route.APP and answer.route is Route.APP:
            raise ConfigError(
                f"the candidate does not answer the calls of {pattern!r}, which the current "
                "weights answer: an attempt could not stay on its side"
            )
    return names


# --- the log --------------------------------------------------------------------------------
class CandidateLog(UsageCounter):
    """Count calls, and remember which weights answered which conversation.

    Args:
        remember: remembers the answered call's conversation.
    """

    needs_bodies = True

    def __init__(self, remember: Callable[[ServedCall], Any]) -> None:
        super().__init__()
        self._remember = remember

    async def record(self, call: ServedCall, outcome: CallOutcome) -> None:
        await super().record(call, outcome)
        if outcome in (CallOutcome.OK, CallOutcome.RESAMPLED):
            await self._remember(call)


# --- the access policy ----------------------------------------------------------------------
class CandidateAccess(PublicAccess):
    """Answer each attempt by the current or the candidate's weights.

    Args:
        current: description of the current run or model.
        candidate_routes: routing of the candidate (`candidate_routing`).
        names: policy that apps may name → the engine's name of the candidate's policy.
        state: the state, which this object closes.
        key: the key that callers must send; None accepts every program of this machine.
        max_tokens: default limit of a chat's answer in tokens; None for the rest of the context.
        upstream: the endpoint for other calls (`PublicAccess`).
    """

    def __init__(
        self,
        current: ServedRun,
        candidate_routes: Routing,
        names: Mapping[str, str],
        state: CandidateState,
        *,
        key: str | None = None,
        max_tokens: int | None = None,
        upstream: LLM | None = None,
    ) -> None:
        super().__init__(current.routing, key=key, max_tokens=max_tokens, upstream=upstream)
        self.log = self.usage = CandidateLog(self._remember)
        self.comparison: Comparison = state.latest()
        """The comparison as it was when the server started."""
        self.state_errors = 0
        """Number of requests for which the state could not be read or written."""
        self._state = state
        self._candidate_routes = candidate_routes
        self._names = dict(names)
        self._sides: dict[Assignment, CallerSession] = {}
        self._assignments: OrderedDict[str, Assignment] = OrderedDict()
        """Key of an attempt → its weights, in the order of the last call."""
        # one thread: a slow disk must not stop the event loop, and the file has one writer
        self._executor = ThreadPoolExecutor(1, "lightspan-candidate")

    def sessions(self) -> list[CallerSession]:
        return [self._session, *self._sides.values()]

    async def close(self) -> None:
        """Wait for the running calls, then close the state. Idempotent."""
        await super().close()
        self._executor.shutdown()
        self._state.close()

    async def call_state(self, function: Callable[[CandidateState], _T]) -> _T:
        """Return the result of `function` for the state, in the state's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, self._state)

    # --- sides ------------------------------------------------------------------------------
    async def assign(
        self, session: CallerSession, request: web.Request, body: Body
    ) -> CallerSession:
        """Return the session of the side that answers the attempt of a request."""
        key = attempt_key(request.headers)
        assignment = None if key is None else self._assignments.get(key)
        if assignment is None:
            assignment = self._of_response(body.fields)
        if assignment is None:
            earlier = await to_thread_if_large(body.size, earlier_keys, body.fields)
            user = user_key(body.fields)
            try:
                assignment = await self.call_state(lambda s: s.assign(key, earlier, user))
            except (sqlite3.Error, ConfigError) as error:
                self._report(error)
                answering = self.comparison.answering or self.comparison.current
                return self._side(Assignment(answering.digest, ""))
        if key is not None:
            self._assignments[key] = assignment
            self._assignments.move_to_end(key)
            while len(self._assignments) > MAX_ATTEMPTS:
                self._assignments.popitem(last=False)
        return self._side(assignment)

    def _of_response(self, body: Mapping[str, Any]) -> Assignment | None:
        """Return the weights of the response that a request continues by its id; None if none."""
        response_id = body.get("previous_response_id")
        if not isinstance(response_id, str):
            return None
        call_id = response_id.removeprefix(ID_PREFIX)
        return next((a for a, session in self._sides.items() if call_id in session.calls), None)

    def _side(self, assignment: Assignment) -> CallerSession:
        session = self._sides.get(assignment)
        if session is None:
            is_candidate = self._is_candidate(assignment)
            routing = self._candidate_routes if is_candidate else self._routing
            session = self._sides[assignment] = shared_session(routing)
            session.answer_model = partial(self._answer_model, assignment)
        return session

    def _is_candidate(self, assignment: Assignment) -> bool:
        return assignment.digest == self.comparison.candidate.digest

    def _answer_model(self, assignment: Assignment, policy: str) -> str:
        side = Side.CANDIDATE if self._is_candidate(assignment) else Side.CURRENT
        comparison_id = assignment.comparison_id
        name = policy.removeprefix(PREFIX)
        return str(Mark(name, assignment.digest, side if comparison_id else None, comparison_id))

    async def _remember(self, call: ServedCall) -> None:
        sides = ((a, session) for a, session in self._sides.items())
        assignment = next((a for a, session in sides if session is call.info.session), None)
        if assignment is None:
            return
        answers = output_messages_of(call.attributes())
        body, size = call.info.body, call.info.size
        keys = await to_thread_if_large(size, conversation_keys, body, answers)
        try:
            await self.call_state(lambda s: s.remember(keys, assignment))
        except sqlite3.Error as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self.state_errors:
            log.warning(
                "the candidate's state %s fails, so calls are answered without being compared: %s",
                self._state.path,
                error,
            )
        self.state_errors += 1

    # --- routing ----------------------------------------------------------------------------
    def target_of_model(
        self, session: CallerSession, model: str, policies: Collection[str]
    ) -> tuple[str, Target]:
        own = [name for name in policies if not name.startswith(PREFIX)]
        path, target = super().target_of_model(self._session, model, own)
        if session.routing is not self._candidate_routes:
            return path, target
        if model in self._names:
            return path, msgspec.structs.replace(target, policy=self._names[model])
        return path, target if model in own else self.target(session, path)

    def models(self, policies: Collection[str]) -> list[str]:
        return super().models([name for name in policies if not name.startswith(PREFIX)])
