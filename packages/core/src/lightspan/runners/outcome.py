"""Derive the outcome and the reward of an attempt from the app's return value or exception.

A failure of the app becomes an outcome here, and raises no exception in the runner. Only
infrastructure failures are retried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from lightspan.capture.call_errors import describe_request, error_code, is_unreachable
from lightspan.errors import LightspanError, RewardError
from lightspan.runners.program import ProgramError
from lightspan.runners.stack_location import describe_stack, error_stack
from lightspan.schema.records import AttemptStatus, Outcome
from lightspan.schema.reward import Reward, parse_reward
from lightspan.schema.semconv import CONTEXT_OVERFLOW
from lightspan.schema.spans import text_of

_ENDS: Final = {Outcome.TIMEOUT: AttemptStatus.TIMEOUT, Outcome.INFRASTRUCTURE: AttemptStatus.LOST}
_MAX_LEAVES: Final = 3
"""Maximum number of exceptions of an exception group that a message quotes."""


class AttemptResult(NamedTuple):
    """The result of an attempt: the fields of its report that depend on the app."""

    status: AttemptStatus
    outcome: Outcome
    message: str = ""
    reward: Reward | None = None
    counts: bool = True
    """Whether the attempt, if it is lost, uses up a try of its rollout."""


STOPPED: Final = AttemptResult(AttemptStatus.LOST, Outcome.CANCELLED, "stopped", counts=False)
"""Result of an attempt whose runner lost the lease or ends. Its rollout is requeued, and the
attempt uses up no try."""


def result_of(value: Any, app: str = "") -> AttemptResult:
    """Return the result of an attempt whose app returned `value`.

    If `value` is no valid reward, the attempt has failed, and the message names the app `app`.
    """
    try:
        return AttemptResult(AttemptStatus.SUCCEEDED, Outcome.OK, reward=parse_reward(value))
    except RewardError as error:
        reason = text_of(error)
    except BaseException as error:  # float() and repr() of the app's object may raise anything
        reason = f"a reward that cannot be read: {type(error).__name__}: {text_of(error)}"
    message = f"the app returned: {reason}{f' ({app:.80})' if app else ''}"
    return AttemptResult(AttemptStatus.FAILED, Outcome.BAD_REWARD, message)


def classify(error: BaseException, gateway_url: str | None, caller: str = "") -> AttemptResult:
    """Return the result of an attempt whose app raised an exception.

    Args:
        error: the exception.
        gateway_url: base URL of the gateway, by which failed requests to it are recognised; None
            without a gateway.
        caller: path of the agent whose model call failed last; empty if unknown.
    """
    if isinstance(error, ProgramError):
        status = _ENDS.get(error.outcome, AttemptStatus.FAILED)
        return AttemptResult(status, error.outcome, text_of(error))
    message = _describe(error)
    if isinstance(error, LightspanError):  # the traceback ends in lightspan's own code
        message += f" ({describe_stack(error_stack(error))})"
    # An app may catch the gateway's error and raise its own, so the causes are searched.
    for cause in _causes(error):
        try:
            code, is_lost = error_code(cause), is_unreachable(cause, gateway_url)
            request = f" ({describe_request(cause, gateway_url, caller)})" if is_lost else ""
        except BaseException:  # attributes of the app's exception may raise anything
            continue
        if isinstance(code, str) and code == CONTEXT_OVERFLOW:
            return AttemptResult(AttemptStatus.FAILED, Outcome.CONTEXT_OVERFLOW, message)
        if is_lost:
            return AttemptResult(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, message + request)
    return AttemptResult(AttemptStatus.FAILED, Outcome.APP_ERROR, message)


def _describe(error: BaseException) -> str:
    """Return the type and text of an exception.

    For an exception group, the first exceptions in the group are added.
    """
    text = f"{type(error).__name__}: {text_of(error)}"
    if not isinstance(error, BaseExceptionGroup):
        return text
    leaves = [f"{type(leaf).__name__}: {text_of(leaf)}" for leaf in _leaves(error)]
    more = [f"{len(leaves) - _MAX_LEAVES} more"] if len(leaves) > _MAX_LEAVES else []
    return f"{text}: {'; '.join([*leaves[:_MAX_LEAVES], *more])}"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _causes(error: BaseException) -> list[BaseException]:
    """Return `error` with all its causes, contexts and members of exception groups."""
    causes: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop()
        # exceptions may refer to each other in a circle, and define __eq__ at will
        if current is None or any(current is cause for cause in causes):
            continue
        causes.append(current)
        queue += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            queue += current.exceptions
    return causes
