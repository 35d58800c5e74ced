"""`lightspan dev`: a dry run of a training."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightspan.errors import ConfigError, DataError, LightspanError
from lightspan.plugins import load_plugin
from lightspan.progress import PlainReporter, print_line

if TYPE_CHECKING:
    from lightspan_tools.dry_run.report_model import DevReport

DESCRIPTION = """\
Run an app on a few tasks and report what training would do: the agents and their calls, which calls
would be trained, frozen or rejected and why, rewards, rows, calls to tools and endpoints, and
memory. Nothing is trained.

The model of --model answers the agents' calls in this process, which shows every token.

A search for prompts (GEPA, APO) trains no model and has no options here: in Python,
print(Trainer(GEPA(…)).dev(app, tasks)) reports what it would do.

Exit status: 1 if fit would stop (such as by a pattern that matches no agent) or train no call, if
all rollouts failed, or all calls of the trained agents, or nothing could be run; 2 wrong arguments.
"""


def add(commands: Any) -> None:
    """Add the subcommand `dev`."""
    parser = commands.add_parser(
        "dev",
        help="dry run: run a few tasks and report what training would do",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "app",
        metavar="MODULE:APP",
        help="such as my_app:answer, a command line with --command, or codex with --verify",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--command", action="store_true", help='the app is a program, such as "node app.js"'
    )
    kind.add_argument(
        "--verify",
        metavar="COMMAND",
        help="the app is a coding agent that CodingAgent knows, such as codex; COMMAND verifies "
        'its work, such as "python -m pytest -q"',
    )
    parser.add_argument(
        "tasks", type=Path, metavar="TASKS.jsonl", help="file with one JSON value per line"
    )
    parser.add_argument("--model", metavar="NAME_OR_FOLDER", help="the model to train")
    parser.add_argument(
        "--optimize",
        action="append",
        metavar="PATTERN",
        help="an agent to train; may be repeated (every agent)",
    )
    parser.add_argument(
        "--frozen",
        choices=["base", "shared"],
        help="weights that answer for all other agents: the starting or the trained ones (the "
        "app's own endpoint). Other endpoints, or a choice per agent, in Python: "
        "print(Trainer(LightningRL(…, frozen={…})).dev(app, tasks))",
    )
    parser.add_argument(
        "--val", type=Path, metavar="TASKS.jsonl", help="held-out tasks of fit; one is run"
    )
    parser.add_argument("--count", type=int, default=4, help="tasks to run (4)")
    parser.add_argument("--group-size", type=int, metavar="N", help="rollouts per task (4)")
    parser.add_argument(
        "--no-replay",
        action="store_true",
        help="do not run rollouts again with the recorded answers, which runs the app's tools "
        "again (rollouts are repeated; no model is asked)",
    )
    parser.add_argument("--steps", type=int, help="iterations of fit (one epoch)")
    parser.add_argument("--runners", type=int, default=8, help="concurrent attempts (8)")
    parser.add_argument(
        "--python", metavar="PATH", help="interpreter of the app's environment (this one)"
    )
    parser.add_argument(
        "--lora", type=int, nargs="?", const=16, metavar="RANK", help="train adapters (of rank 16)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="timeout of a rollout (120)"
    )
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda" (cpu)')
    parser.add_argument("--max-frozen-calls", type=int, metavar="N", help="max_frozen_calls of fit")
    parser.add_argument(
        "--folder", type=Path, help="folder in which to keep the rollouts for lightspan inspect"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const=Path("-"),
        type=Path,
        metavar="PATH",
        help="write the report as JSON, to a file or in place of the text",
    )
    parser.set_defaults(run=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    if options.model is None:
        parser.error(
            "--model is missing: give the model that LightningRL would train. A search for prompts "
            "(GEPA, APO) trains none: call Trainer(GEPA(…)).dev(app, tasks) in Python"
        )
    try:
        report = _report(options)
    except KeyboardInterrupt:
        print("lightspan: stopped; nothing was trained", file=sys.stderr)
        raise
    text = report.write(options.json)
    if not report.failure:
        return text
    print_line(text)
    raise LightspanError(report.failure)


def _report(options: argparse.Namespace) -> DevReport:
    from lightspan import LightningRL, LocalRunners, LoRA, Trainer
    from lightspan.runners.app import load_app

    if os.path.isdir(options.tasks) or not os.path.exists(options.tasks):  # a pipe is accepted
        raise DataError(f"there is no tasks file {options.tasks}: give one with a JSON per line")
    if not options.timeout > 0:
        raise ConfigError(f"--timeout {options.timeout:g} must be above 0")
    if os.getcwd() not in sys.path:  # as `python -m` does, to import the app
        sys.path.insert(0, os.getcwd())
    app: Any = _app(options)
    runners: Any = options.runners
    if options.python is None:
        app = load_app(app)
    else:
        runners = LocalRunners(runners, python=options.python, app_dirs=[os.getcwd()])
    algorithm = LightningRL(
        options.model,
        optimize=options.optimize or "*",
        frozen=options.frozen,
        lora=None if options.lora is None else LoRA(rank=options.lora),
        timeout_s=options.timeout,
    )
    trainer = Trainer(
        algorithm,
        runners=runners,
        steps=options.steps,
        device=options.device,
        max_frozen_calls=options.max_frozen_calls,
        reporter=PlainReporter(sys.stderr),
    )
    return trainer.dev(
        app,
        options.tasks,
        options.val,
        count=options.count,
        group_size=options.group_size,
        folder=options.folder,
        replay=not options.no_replay,
    )


def _app(options: argparse.Namespace) -> str:
    """Return the name by which runners import the app.

    With `--command`, the user gives a command line instead of a name, and with `--verify` the name
    of a coding agent. They are wrapped in a `Command` and a `CodingAgent`, which have such names.
    """
    if options.verify is not None:
        coding_agent = load_plugin("api", "CodingAgent")
        return str(coding_agent(options.app, verify=_words(options.verify)).reference)
    if not options.command:
        return str(options.app)
    return str(load_plugin("api", "Command")(_words(options.app)).reference)


def _words(line: str) -> list[str]:
    """Return the words of a command line."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"the command line {line!r} cannot be read: {error}") from error
