"""The reward of a program: read from its exit status or from the last line that it wrote."""

from __future__ import annotations

import json
import re
import signal
from typing import Any, Final

from lightspan.errors import AppError, RewardError
from lightspan.runners.command.process import KEPT_BYTES, Ended, Tail
from lightspan.schema.records import Outcome
from lightspan.schema.redaction import without_keys
from lightspan.schema.reward import parse_reward

_NUMBER: Final = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE
)
_COMPLAINT: Final = re.compile(r"(?=\S).*(?:error|exception|panic|fatal)", re.IGNORECASE)
_SHOWN: Final = 200
"""Characters of a line that a message quotes."""
_WRITE: Final = "write a number, or a JSON object of named numbers, as the last line of stdout"


class ProgramError(AppError):
    """A program ended, or could not begin, in a way that is no reward."""

    def __init__(self, message: str, outcome: Outcome = Outcome.APP_ERROR) -> None:
        super().__init__(message)
        self.outcome = outcome
        """What that means for the attempt."""


def reward_by_exit(ended: Ended, stderr: str) -> float:
    """1.0 for exit status 0, 0.0 for exit status 1.

    Args:
        stderr: as people see it.

    Raises:
        ProgramError: any other status, or a signal.
    """
    if ended.status in (0, 1):
        return 1.0 - ended.status
    raise failure(ended, stderr)


def reward_by_last_line(ended: Ended, stdout: Tail, stderr: str, secret: str = "") -> Any:
    """The reward that the last line of stdout which is not blank says, for `parse_reward`.

    Args:
        stderr: as people see it.
        secret: is left out of messages.

    Raises:
        ProgramError: an exit status other than 0; no such line; a line that is no reward.
    """
    if ended.status != 0:
        raise failure(ended, stderr)
    line = last_line(stdout)
    if line is None:
        raise _no_reward(f"the program wrote no line to stdout: {_WRITE}")
    if line == "":
        raise _no_reward(
            f"the last line of the program's output is longer than {KEPT_BYTES} bytes: {_WRITE}"
        )
    try:
        value = _value(line)
        parse_reward(value)
    except RewardError as error:
        quoted = shortened(without(secret, line))
        reason = without(secret, str(error))
        raise _no_reward(f"the program's last line {quoted!r}: {reason}") from error
    return value


def last_line(tail: Tail) -> str | None:
    """The last line that is not blank; None if there is none, empty if it is not kept whole."""
    data = tail.data.rstrip()
    if not data:
        return None if tail.whole else ""
    start = data.rfind(b"\n") + 1
    if start == 0 and not tail.whole:
        return ""
    return data[start:].decode(errors="replace").strip("\ufeff \t\r")


def _value(line: str) -> Any:
    if _NUMBER.fullmatch(line):
        return float(line)
    try:
        return json.loads(line, parse_int=float, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"that is no reward; {_WRITE}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    rewards = dict(pairs)
    if len(rewards) != len(pairs):  # JSON would let the last one win
        raise ValueError("a name is given twice")
    return rewards


def failure(ended: Ended, stderr: str) -> ProgramError:
    """The outcome of a program that failed, with what it complained of last."""
    if ended.status < 0:
        try:
            how = f"was ended by {signal.Signals(-ended.status).name}"
        except ValueError:  # a real-time signal
            how = f"was ended by signal {-ended.status}"
    else:
        how = f"ended with exit status {ended.status}"
    reason = complaint(stderr)
    return ProgramError(f"the program {how}" + (f": {shortened(reason)}" if reason else ""))


def complaint(stderr: str) -> str:
    """The last line that names an error, else the last line; empty if there is none."""
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if _COMPLAINT.match(line)]
    return (telling or lines or [""])[-1].strip()


def _no_reward(message: str) -> ProgramError:
    return ProgramError(message, Outcome.BAD_REWARD)


def shortened(text: str) -> str:
    """The text, or its beginning."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def shown(tail: Tail, secret: str = "") -> str:
    """What is kept of a stream, for people: control characters escaped, `secret` left out."""
    text = tail.data.decode(errors="replace").replace("\r\n", "\n")
    text = "".join(map(_printable, without(secret, text)))
    left_out = tail.count - len(tail.data)
    return f"[{left_out} bytes before this are not kept]\n{text}" if left_out else text


def without(secret: str, text: str) -> str:
    """The text with `secret`, the call token, left out, and keys of the user's."""
    return without_keys(text.replace(secret, "<call token>") if secret else text)


def _printable(char: str) -> str:
    plain = char.isprintable() or char in "\n\t"
    return char if plain else char.encode("unicode_escape").decode()
