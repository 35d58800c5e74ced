"""The command `lightspan candidate`."""

from __future__ import annotations

import argparse
import os
from typing import Any, Final

import msgspec

from lightspan.errors import ConfigError

# as in `lightspan.production`, which the gateway must not import
STORE_VARIABLE: Final = "LIGHTSPAN_STORE"
KEY_VARIABLE: Final = "LIGHTSPAN_API_KEY"


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "candidate",
        help="compare a served candidate with the current weights; promote it or roll it back",
        description="Compare the verdicts and rewards of attempts that the candidate of `lightspan "
        "serve --candidate` answered with those of the current weights, and decide. `promote` lets "
        "the candidate answer all new attempts, `roll-back` the current weights. Attempts that "
        "have begun keep their weights. A candidate that is worse, by the 95 % interval of the "
        "rewards or of the failures, is promoted with --anyway only.",
    )
    parser.add_argument("action", choices=["status", "promote", "roll-back"])
    parser.add_argument(
        "target",
        metavar="SERVER|RUN",
        help="URL of the server, the folder that it serves, or its --candidate-state",
    )
    parser.add_argument(
        "--store", metavar="URL", help="store to which the apps record (LIGHTSPAN_STORE)"
    )
    parser.add_argument(
        "--anyway", action="store_true", help="promote a candidate that is worse or not compared"
    )
    parser.add_argument(
        "--key-env", metavar="NAME", help="the variable with the server's key (LIGHTSPAN_API_KEY)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the text")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    from lightspan_gateway.serving.candidate import client

    store, key = options.store or os.environ.get(STORE_VARIABLE), _key(options.key_env)
    status = client.status_of(options.target, key)
    result = None
    if store:
        server = _server(options.target, status.comparison, key)
        result = _result(store, status.comparison.comparison_id, server)
    if options.action != "status":
        status = _decide(options, status.comparison.comparison_id, result, key)
    if options.json:
        return msgspec.json.encode({"server": status, "result": result}).decode()
    return "\n".join(_lines(options.action, store, status, result))


def _decide(options: argparse.Namespace, comparison_id: str, result: Any, key: str) -> Any:
    """Promote the candidate, or roll it back; return the status.

    Args:
        options: options of the command.
        comparison_id: the comparison to decide.
        result: the comparison in the store; None if it is not compared.
        key: key of the server; empty for none.
    """
    from lightspan_gateway.serving.candidate import client
    from lightspan_gateway.serving.candidate.gateway import DecisionRequest

    _check(options, result)
    decision = DecisionRequest(
        comparison_id=comparison_id,
        reason="not compared" if result is None else result.sentence,
    )
    return client.decide(options.target, options.action, decision, key)


def _lines(action: str, store: str | None, status: Any, result: Any) -> list[str]:
    """Return the lines to print: the status, and the comparison in the store.

    Args:
        action: `status`, `promote` or `roll-back`.
        store: URL of the store; None or empty for none.
        status: the status.
        result: the comparison in the store; None if it is not compared.
    """
    from lightspan_gateway.serving.candidate.comparison import missing_lines, report_lines

    lines = _status_lines(status)
    if result is not None:
        return [*lines, *report_lines(result), *missing_lines(result, _begun(status))]
    if action == "roll-back":
        return lines
    if store:
        return [
            *lines,
            f"the store has no attempt of comparison {status.comparison.comparison_id}: apps must "
            "record to it (lightspan.record, or OpenTelemetry) while `lightspan serve --candidate` "
            "answers them",
        ]
    return [*lines, f"rewards are compared with --store URL (${STORE_VARIABLE})"]


def _key(name: str | None) -> str:
    """Return the server's key, from the variable `name`, or from `LIGHTSPAN_API_KEY` if None."""
    if name is None:
        return os.environ.get(KEY_VARIABLE, "")
    if not os.environ.get(name):
        raise ConfigError(f"--key-env {name}: that variable is not set; set it to the server's key")
    return os.environ[name]


def _server(target: str, comparison: Any, key: str) -> Any:
    """Return what the server, or the file of its state, knows about a comparison."""
    from lightspan_gateway.serving.candidate import client
    from lightspan_gateway.serving.candidate.comparison import ServerRecord
    from lightspan_gateway.serving.candidate.sides import Side

    return ServerRecord(
        digests={side: comparison.weights(side).digest for side in Side},
        started_at=comparison.started_at,
        assigned=lambda keys: client.assigned(target, comparison.comparison_id, keys, key),
    )


def _result(store: str, comparison_id: str, server: Any) -> Any:
    """Return the comparison in a store; None if the store has no attempt of it."""
    from lightspan.stores import open_existing
    from lightspan.stores.aio import run_sync
    from lightspan_gateway.serving.candidate.comparison import read_comparison

    async def read() -> Any:
        async with open_existing(store) as opened:
            return await read_comparison(opened, comparison_id, server)

    return run_sync(read())


def _check(options: argparse.Namespace, result: Any) -> None:
    """Raise `ConfigError` if a candidate that lost, or was not compared, is to be promoted."""
    if options.action != "promote" or options.anyway:
        return
    if result is None:
        raise ConfigError(
            "the candidate is not compared: give --store URL, with attempts of this comparison, or "
            "promote it --anyway"
        )
    if result.is_worse:
        raise ConfigError(f"not promoted: {result.sentence}. Roll it back, or promote it --anyway")


def _begun(status: Any) -> dict[Any, int]:
    """Return side → number of attempts that the server counted."""
    from lightspan_gateway.serving.candidate.sides import Side

    sides = (Side.CANDIDATE, Side.CURRENT)
    return {side: status.begun.get(status.comparison.weights(side).digest, 0) for side in sides}


def _status_lines(status: Any) -> list[str]:
    comparison = status.comparison
    decision = (
        f"{comparison.share:.3g} of new attempts go to the candidate"
        if comparison.decision is None
        else f"the candidate was {comparison.decision}: {comparison.answering.folder} answers all "
        f"new attempts ({comparison.reason})"
    )
    lines = [f"comparison {comparison.comparison_id}: {decision}"]
    for side, count in _begun(status).items():
        weights = comparison.weights(side)
        lines.append(f"  {side} {weights.digest} ({weights.folder}): {count:,} attempts began")
    if status.state_errors:
        lines.append(f"  {status.state_errors:,} requests were not compared: see the server's log")
    return lines
