"""What became of an attempt: from what the app returned or raised to an outcome and a reward.

Failures are outcomes, not exceptions (design law 4), and they are classified here only. Nothing but
infrastructure that failed is tried again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from lightspan.errors import RewardError
from lightspan.runners.command.reward import ProgramError
from lightspan.schema.records import AttemptStatus, Outcome
from lightspan.schema.reward import Reward, parse_reward
from lightspan.schema.semconv import CONTEXT_OVERFLOW
from lightspan.schema.spans import text_of

_STATUS_OF: Final = {
    Outcome.TIMEOUT: AttemptStatus.TIMEOUT,
    Outcome.INFRASTRUCTURE: AttemptStatus.LOST,
}


class AttemptResult(NamedTuple):
    """How an attempt ended: the fields of its report that the app decides."""

    status: AttemptStatus
    outcome: Outcome
    message: str = ""
    reward: Reward | None = None
    counts: bool = True
    """False for a lost attempt that uses up no try."""


STOPPED: Final = AttemptResult(AttemptStatus.LOST, Outcome.CANCELLED, "stopped", counts=False)
"""The runner lost the lease or is going: the rollout is queued again, and no try is used up."""


def returned(value: Any) -> AttemptResult:
    """What a value that the app returned means for the attempt: its reward, if it is one."""
    try:
        return AttemptResult(AttemptStatus.SUCCEEDED, Outcome.OK, reward=parse_reward(value))
    except RewardError as error:
        reason = text_of(error)
    except BaseException as error:  # the app's object makes what it likes of float() and repr()
        reason = f"a reward that cannot be read: {type(error).__name__}: {text_of(error)}"
    return AttemptResult(AttemptStatus.FAILED, Outcome.BAD_REWARD, f"the app returned: {reason}")


def classify(error: BaseException, gateway_url: str | None) -> AttemptResult:
    """What an exception of the app means for the attempt."""
    if isinstance(error, ProgramError):
        status = _STATUS_OF.get(error.outcome, AttemptStatus.FAILED)
        return AttemptResult(status, error.outcome, text_of(error))
    message = _told(error)
    # An app may catch what the gateway answered and raise its own: the reason lies further down.
    for cause in _causes(error):
        try:
            code, is_unreachable = _code(cause), _gateway_unreachable(cause, gateway_url)
        except BaseException:  # the app's exception makes what it likes of its attributes
            continue
        if isinstance(code, str) and code == CONTEXT_OVERFLOW:
            return AttemptResult(AttemptStatus.FAILED, Outcome.CONTEXT_OVERFLOW, message)
        if is_unreachable:
            return AttemptResult(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, message)
    return AttemptResult(AttemptStatus.FAILED, Outcome.APP_ERROR, message)


_MAX_TOLD: Final = 3
"""Of the exceptions in a group."""


def _told(error: BaseException) -> str:
    """The exception's name and text; of a group, as a TaskGroup raises, what is in it too."""
    text = f"{type(error).__name__}: {text_of(error)}"
    if not isinstance(error, BaseExceptionGroup):
        return text
    found = list(_leaves(error))
    told = [f"{type(leaf).__name__}: {text_of(leaf)}" for leaf in found[:_MAX_TOLD]]
    more = [f"{len(found) - _MAX_TOLD} more"] if len(found) > _MAX_TOLD else []
    return f"{text}: {'; '.join([*told, *more])}"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _causes(error: BaseException) -> list[BaseException]:
    """The exception, what it was raised from, and what a group holds."""
    causes: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop()
        # exceptions may refer to each other in a circle, and be equal to what they like
        if current is None or any(current is known for known in causes):
            continue
        causes.append(current)
        queue += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            queue += current.exceptions
    return causes


def _code(error: BaseException) -> Any:
    """The code that an endpoint gave with an error, in OpenAI's words or Anthropic's."""
    code = getattr(error, "code", None)
    return _said(error, "details", "error_code") if code is None else code


def _said(error: BaseException, *names: str) -> Any:
    """What the body of an Anthropic client's error says under these names; None if it does not."""
    value = getattr(error, "body", None)
    for name in ("error", *names):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _gateway_unreachable(error: BaseException, gateway_url: str | None) -> bool:
    """Whether it is a connection error, or a 5xx, of our own gateway: the app could not help it."""
    try:
        url = str(error.request.url)  # type: ignore[attr-defined]
    except Exception:  # most exceptions have none, and httpx raises where it knows none
        return False
    if gateway_url is None or not url.startswith(f"{gateway_url}/"):
        return False
    # the HTTP client's own exception, which the SDK's was raised over, has a response alone
    answered = (error, getattr(error, "response", None))
    status = next((s for a in answered if (s := getattr(a, "status_code", None)) is not None), None)
    # to Anthropic's client what broke off in a stream has the status with which it began
    return status is None or status >= 500 or (status < 400 and _said(error, "type") == "api_error")
