"""Read the reward of a program from its exit status or from the last line of its stdout."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from lightspan.errors import RewardError
from lightspan.progress import escape_control
from lightspan.runners.crash_recovery import signal_name
from lightspan.runners.program import ProgramError
from lightspan.schema.records import Outcome
from lightspan.schema.redaction import without_keys
from lightspan.schema.reward import parse_reward
from lightspan_programs.process import KEPT_BYTES, Ended, Tail

_NUMBER: Final = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE
)
_ERROR: Final = re.compile(r"(?=\S).*(?:error|exception|panic|fatal)", re.IGNORECASE)
PROGRAM: Final = "the program"
_MAX_QUOTE_LENGTH: Final = 200
"""Maximum number of characters of a quoted line in an error message."""
_HINT: Final = "write a number, or a JSON object of named numbers, as the last line of stdout"


def reward_by_exit(ended: Ended, stderr: str) -> float:
    """Return 1.0 for exit status 0, and 0.0 for exit status 1.

    Args:
        ended: how the program ended.
        stderr: printable text of stderr, for the error message.

    Raises:
        ProgramError: the program ended with another status or by a signal.
    """
    if ended.status in (0, 1):
        return 1.0 - ended.status
    raise failure(ended, stderr)


def reward_by_last_line(
    ended: Ended, stdout: Tail, stderr: str, secret: str = "", what: str = PROGRAM
) -> Any:
    """Return the value in the last non-blank line of stdout, which `parse_reward` accepts.

    Args:
        ended: how the program ended.
        stdout: the last bytes of stdout.
        stderr: printable text of stderr, for error messages.
        secret: the call token, which is left out of error messages; empty without one.
        what: the program, for error messages.

    Raises:
        ProgramError: the exit status is not 0, stdout has no such line, the line is too long, or it
            is not a reward.
    """
    if ended.status != 0:
        raise failure(ended, stderr, what)
    line = last_line(stdout)
    if line is None:
        raise _no_reward(f"{what} wrote no line to stdout: {_HINT}")
    if line == "":
        raise _no_reward(
            f"the last line of {what}'s output is longer than {KEPT_BYTES} bytes: {_HINT}"
        )
    try:
        value = _value(line)
        parse_reward(value)
    except RewardError as error:
        quoted = shortened(without_secrets(secret, line))
        reason = without_secrets(secret, str(error))
        raise _no_reward(f"{what}'s last line {quoted!r}: {reason}") from error
    return value


def last_line(tail: Tail) -> str | None:
    """Return the last non-blank line of a stream.

    None if there is no such line. Empty if the line is longer than what `tail` keeps.
    """
    data = tail.data.rstrip()
    if not data:
        return None if tail.is_whole else ""
    start = data.rfind(b"\n") + 1
    if start == 0 and not tail.is_whole:
        return ""
    return data[start:].decode(errors="replace").strip("\ufeff \t\r")


def _value(line: str) -> Any:
    if _NUMBER.fullmatch(line):
        return float(line)
    try:
        return json.loads(line, parse_int=float)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"that is no reward; {_HINT}") from error


def failure(ended: Ended, stderr: str, what: str = PROGRAM) -> ProgramError:
    """Return the error for a program that failed, with the last error message in `stderr`.

    Args:
        ended: how the program ended.
        stderr: printable text of stderr; empty without any.
        what: the program, for the message.
    """
    how = f"ended with exit status {ended.status}"
    if ended.status < 0:
        how = f"was ended by {signal_name(-ended.status) or f'signal {-ended.status}'}"
    reason = last_error(stderr)
    return ProgramError(f"{what} {how}" + (f": {shortened(reason)}" if reason else ""))


def last_error(stderr: str) -> str:
    """Return the last line of `stderr` that names an error, or else its last non-blank line.

    Empty if there is no line.
    """
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    return ([line for line in lines if _ERROR.match(line)] or lines or [""])[-1].strip()


def _no_reward(message: str) -> ProgramError:
    return ProgramError(message, Outcome.BAD_REWARD)


def shortened(text: str) -> str:
    """Return `text`, cut after `_MAX_QUOTE_LENGTH` characters."""
    return text if len(text) <= _MAX_QUOTE_LENGTH else f"{text[:_MAX_QUOTE_LENGTH]}…"


def printable(tail: Tail, secret: str = "") -> str:
    """Return the last bytes of a stream as text, with control characters escaped and keys replaced.

    Args:
        tail: the last bytes of the stream.
        secret: the call token, which is replaced too; empty without one.
    """
    text = escape_control(without_secrets(secret, tail.data.decode(errors="replace")))
    cut = tail.count - len(tail.data)
    return f"[{cut} bytes before this are not kept]\n{text}" if cut else text


def without_secrets(secret: str, text: str) -> str:
    """Return `text` with the call token `secret` and all known keys replaced (`without_keys`).

    An empty `secret` stands for no call token.
    """
    return without_keys(text.replace(secret, "<call token>") if secret else text)
