"""Run a program once within an attempt, and record its span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightspan.capture.context import AgentContext, current_agent, make_span
from lightspan.runners.program import ProgramError
from lightspan.schema import semconv as c
from lightspan.schema.records import Outcome
from lightspan.schema.spans import Attributes, SpanKind, SpanStatus, now_ns
from lightspan_programs.process import Ended, Tail, Watchdog, run_program
from lightspan_programs.reward import PROGRAM, failure, printable, without_secrets


class Execution(NamedTuple):
    """A program that has ended."""

    ended: Ended
    stdout: Tail
    stderr: str
    """The printable end of stderr."""


async def execute(
    arguments: Sequence[str],
    *,
    watchdog: Watchdog,
    env: Mapping[str, str],
    cwd: str | None,
    timeout_s: float | None,
    name: str = "",
    what: str = PROGRAM,
) -> Execution:
    """Run a program until it ends, and add its span to the attempt.

    Args:
        arguments: the program and its arguments.
        watchdog: watchdog that kills the program if this process dies.
        env: all environment variables of the program.
        cwd: the program's working folder; None for that of this process.
        timeout_s: seconds that the program may run; None for no limit.
        name: name of the span; "" for that of the program.
        what: the program, for error messages.

    Raises:
        ProgramError: the program could not start, or ran too long.
    """
    agent = current_agent()
    secret = "" if agent is None else agent.scope.call_token
    stdout, stderr = Tail(), Tail()
    ended, start_ns = None, now_ns()
    try:
        ended = await run_program(
            arguments,
            watchdog=watchdog,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            timeout_s=timeout_s,
        )
    except OSError as error:
        raise ProgramError(
            f"{what} {arguments[0]!r} could not be started: {error}", Outcome.INFRASTRUCTURE
        ) from error
    finally:
        output = [printable(stdout, secret), printable(stderr, secret)]
        if agent is not None:
            shown = [without_secrets(secret, argument) for argument in arguments]
            label = name or Path(arguments[0]).name
            _record(agent, label, what, shown, start_ns, ended, *output)
    if ended.timed_out:
        raise ProgramError(f"{what} ran longer than {timeout_s:g} s", Outcome.TIMEOUT)
    return Execution(ended, stdout, output[1])


def _record(
    agent: AgentContext,
    name: str,
    what: str,
    arguments: Sequence[str],
    start_ns: int,
    ended: Ended | None,
    stdout: str,
    stderr: str,
) -> None:
    """Add the span of one execution of a program to the attempt.

    Args:
        agent: context in which the program was run.
        name: name of the program.
        what: the program, for the status message.
        arguments: the program and its arguments, without keys.
        start_ns: start, nanoseconds since the epoch.
        ended: end of the program; None if it was stopped or could not start.
        stdout: printable end of stdout.
        stderr: printable end of stderr.
    """
    attributes: Attributes = {
        c.COMMAND_ARGUMENTS: list(arguments),
        c.COMMAND_STDOUT: stdout,
        c.COMMAND_STDERR: stderr,
    }
    message = "it was stopped"
    if ended is not None:
        attributes[c.COMMAND_STATUS] = ended.status
        message = "it ran too long" if ended.timed_out else str(failure(ended, stderr, what))
    is_ok = ended is not None and ended.status == 0
    span = make_span(
        agent,
        f"command {name}",
        SpanKind.OPERATION,
        attributes,
        start_ns=start_ns,
        end_ns=now_ns(),
        status=SpanStatus.OK if is_ok else SpanStatus.ERROR,
        status_message="" if is_ok else message,
    )
    agent.scope.recorder.add(span)
