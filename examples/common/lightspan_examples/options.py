"""The options that every example's `train.py` takes."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightspan.plugins import installed_plugins
from lightspan_tools.dry_run.report_model import STDOUT


def add_options(
    parser: argparse.ArgumentParser, name: str, cache: Path, data_help: str | None
) -> None:
    """Add the options to `parser`.

    Args:
        name: name of the example's folder.
        cache: default of `--cache`.
        data_help: help text of `--data DIR`; None if the example has no such option.
    """
    parser.add_argument("--seed", type=int, default=0, help="of the warm start and training (0)")
    parser.add_argument(
        "--model", help="folder or hub name of a chat model; without it a small one is built"
    )
    parser.add_argument("--device", default="cpu", help='"cpu", "cuda" or "cuda:1" (cpu)')
    parser.add_argument(
        "--token-budget",
        type=int,
        metavar="N",
        help="tokens that the learner computes at once; lower it when memory runs out",
    )
    parser.add_argument(
        "--vllm",
        metavar="PYTHON",
        help="sample with vLLM servers, by their environment's interpreter (docs/guides/vllm.md)",
    )
    parser.add_argument(
        "--verl",
        metavar="PYTHON",
        help="learn with verl, by the interpreter of its environment (docs/guides/verl.md)",
    )
    parser.add_argument("--lora", action="store_true", help="train adapters, not the full weights")
    if data_help:
        parser.add_argument("--data", type=Path, metavar="DIR", help=data_help)
    else:
        parser.set_defaults(data=None)
    parser.add_argument(
        "--dev", action="store_true", help="a dry run: report what training would do, and stop"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        type=Path,
        metavar="PATH",
        help="with --dev: the report as JSON, to a file or in place of the text",
    )
    parser.add_argument(
        "--sink",
        action="append",
        default=[],
        choices=list(installed_plugins("sinks")),
        help="send metrics there too; may be repeated",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--steps", type=int, help="training iterations")
    parser.add_argument(
        "--demonstrations",
        type=int,
        metavar="N",
        help="that the small model imitates first: fewer are sooner over, and it begins worse",
    )
    parser.add_argument(
        "--validate-every",
        type=int,
        help="iterations between evaluations on the way, which are not of the held-out questions; "
        "0 for none (half of --steps)",
    )
    parser.add_argument("--held-out", type=int, default=500, help="held-out questions (500)")
    parser.add_argument("--runners", type=int, default=16, help="attempts at once (16)")
    parser.add_argument("--folder", type=Path, help=f"of the run (runs/{name}-seed<seed>)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache,
        help=f"where data and warm starts are kept (examples/{name}/.cache)",
    )


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with exit status 2 if options contradict one another."""
    if not options.dev:
        if options.json is not None:
            parser.error("--json applies only to a dry run: give --dev too")
    elif options.resume:
        parser.error("--dev trains nothing that --resume could go on with")
    if options.data is not None and options.model is None:
        parser.error("--data needs --model: the small model knows no words but its own")
    if options.demonstrations is not None:
        if options.model is not None:
            parser.error("--demonstrations applies only to the small model: leave --model out")
        if options.demonstrations < 1:
            parser.error(f"--demonstrations {options.demonstrations} must be at least 1")
    if options.held_out < 1:
        parser.error(f"--held-out {options.held_out} must be at least 1")
