"""`lightspan harbor`: train an agent of Harbor on a suite of tasks, without a program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightspan.errors import ConfigError, LightspanError
from lightspan.progress import PlainReporter, print_line

DESCRIPTION = """\
Train the model behind an agent of Harbor on a suite of tasks. Each rollout is a trial of Harbor: a
sandbox, the agent in it, and the task's verifier, which gives the reward.

With --dry-run one trial is run, and a report shows what it cost, which calls could be trained, and
why others could not. Nothing is trained.

The calls of --agents NAME are those for the model NAME, those to the URL agents/NAME/v1, and those
with the header x-lightspan-agent: NAME. All other calls belong to the agent app, so --optimize app
--frozen base --agents small trains the main loop alone.

Exit status of a dry run: 1 if training would stop or train no call, or the trial failed.
"""


def add(commands: Any) -> None:
    """Add the subcommand `harbor`."""
    parser = commands.add_parser(
        "harbor",
        help="train an agent of Harbor on a suite of tasks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", metavar="SUITE", help="folder of Harbor tasks")
    parser.add_argument("--agent", required=True, help="such as mini-swe-agent, codex, terminus-2")
    parser.add_argument("--model", required=True, metavar="NAME_OR_FOLDER", help="model to train")
    parser.add_argument("--environment", default="docker", help="kind of sandbox (docker)")
    parser.add_argument("--val", metavar="SUITE", help="folder of held-out tasks")
    parser.add_argument("--dry-run", action="store_true", help="run one trial; train nothing")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the agent, such as max_turns=20; may be repeated",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the agent, such as one that names its small model; may be repeated",
    )
    parser.add_argument(
        "--agents",
        action="append",
        default=[],
        metavar="NAME",
        help="a side agent, such as that of titles; may be repeated",
    )
    parser.add_argument(
        "--optimize", action="append", metavar="PATTERN", help="an agent to train (every agent)"
    )
    parser.add_argument(
        "--frozen", choices=["base", "shared"], help="weights that answer for all other agents"
    )
    parser.add_argument("--group-size", type=int, default=8, help="rollouts per task (8)")
    parser.add_argument(
        "--tasks-per-step", type=int, default=16, help="tasks per step, at most all (16)"
    )
    parser.add_argument("--steps", type=int, help="iterations (one epoch)")
    parser.add_argument("--runners", type=int, default=8, help="concurrent trials (8)")
    parser.add_argument(
        "--python", metavar="PATH", help="interpreter of the environment with Harbor (this one)"
    )
    parser.add_argument("--lora", type=int, nargs="?", const=16, metavar="RANK", help="adapters")
    parser.add_argument("--max-tokens", type=int, help="maximum tokens of an answer")
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda" (cpu)')
    parser.add_argument(
        "--gateway", metavar="HOST", help="address of this machine that sandboxes can reach"
    )
    parser.add_argument("--folder", type=Path, help="folder of the run (runs/<date and time>)")
    parser.add_argument("--resume", action="store_true", help="resume the run in the folder")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    from lightspan import LightningRL, LocalRunners, LoRA, Trainer
    from lightspan_harbor import HarborTasks, trial

    tasks = HarborTasks(options.suite)
    val = None if options.val is None else HarborTasks(options.val)
    app = trial(
        agent=options.agent,
        environment=options.environment,
        options={name: _value(value) for name, value in _pairs("--option", options.option)},
        env=dict(_pairs("--env", options.env)),
        agents=options.agents,
    )
    algorithm = LightningRL(
        options.model,
        optimize=options.optimize or "*",
        frozen=options.frozen,
        group_size=options.group_size,
        tasks_per_step=min(options.tasks_per_step, len(tasks)),
        lora=None if options.lora is None else LoRA(rank=options.lora),
        timeout_s=None,  # tasks have time limits of their own
        **({} if options.max_tokens is None else {"max_tokens": options.max_tokens}),
    )
    python = {} if options.python is None else {"python": options.python}
    trainer = Trainer(
        algorithm,
        runners=LocalRunners(options.runners, **python),
        steps=options.steps,
        device=options.device,
        gateway=options.gateway,
        folder=None if options.dry_run else options.folder,
        reporter=PlainReporter(sys.stderr),
    )
    if not options.dry_run:
        return str(trainer.fit(app, tasks, val, resume=options.resume).summary())
    report = trainer.dev(app, tasks, count=1, group_size=1, folder=options.folder, replay=False)
    if not report.failure:
        return str(report)
    print_line(str(report))
    raise LightspanError(report.failure)


def _pairs(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return names and values of `NAME=VALUE`.

    Raises:
        ConfigError: a text is none.
    """
    pairs = []
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise ConfigError(f"{option} {text!r}: write NAME=VALUE, such as max_turns=20")
        pairs.append((name, value))
    return pairs


def _value(text: str) -> Any:
    """Return the value of an option: as JSON if it is JSON, else the text."""
    import msgspec

    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
