"""`lightspan export`: what a run recorded and learned, for other programs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from lightspan.errors import ConfigError, DataError
from lightspan.progress import plural, print_line
from lightspan.schema.records import Mode
from lightspan.stores import public_url
from lightspan_tools.commands._query import add_query, read_query

_CALLS: Final = ("transitions", "messages")
_FILES: Final = ("spans", *_CALLS, "tasks")
_HONOURED: Final[Mapping[str, tuple[str, ...]]] = {
    "output": (*_FILES, "model", "prompts"),
    "format": _FILES,
    "mode": _FILES,
    "agent": _CALLS,
    "min-reward": _FILES,
    "merge": ("model",),
    "policy": ("model",),
    "prompt": ("prompts",),
}
"""Option → the exports that it applies to; those of a store are in `_query`."""


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "export",
        help="write spans, transitions, chats, prompts or the model",
        description="Write what a run or production recorded as JSONL or Parquet: every span, "
        "every call of a trained agent as token ids with log-probabilities, reward and advantage "
        "(transitions), every call as chat messages, or what was asked, as tasks. Or copy a run's "
        "trained model, or write the prompts that it learned as plain texts.",
    )
    parser.add_argument(
        "run_folder",
        metavar="RUN",
        help="a folder such as runs/sql, or the store of production, such as sqlite:app.db",
    )
    parser.add_argument(
        "what",
        choices=[*_FILES, "model", "prompts"],
        help="model and prompts: of a run only",
    )
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="PATH",
        help="a file (standard output if absent), or a new folder for the model or for prompts, a "
        "file each",
    )
    parser.add_argument(
        "--format",
        choices=["jsonl", "parquet"],
        help="by the file's name if absent, else jsonl; not for the model",
    )
    parser.add_argument(
        "--mode",
        choices=[str(mode) for mode in Mode],
        help="all if absent; not for the model",
    )
    parser.add_argument(
        "--agent",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only calls of these agents, a name or a glob on paths; for transitions and messages; "
        "may be repeated",
    )
    parser.add_argument(
        "--min-reward",
        type=float,
        metavar="R",
        help="only rollouts that earned R; not for the model",
    )
    add_query(parser)
    parser.add_argument(
        "--merge", action="store_true", help="merge the LoRA adapter into its base; for the model"
    )
    parser.add_argument("--policy", help="whose model, if the run has several")
    parser.add_argument(
        "--prompt", metavar="NAME", help="one of the prompts, to paste; all if absent"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    for name, honoured in _HONOURED.items():
        value = getattr(options, name.replace("-", "_"))
        is_given = value is not None and value is not False and value != []  # 0.0 is given
        if is_given and options.what not in honoured:
            raise ConfigError(
                f"{_as_given(name, value)} applies only to {', '.join(honoured)}, not to "
                f"{options.what}: leave it out"
            )
    acts = {"model": _copy_model, "prompts": _write_prompts}
    act = acts.get(options.what, _write)
    if read_query(options, options.run_folder) is not None and act is not _write:
        source = f"{public_url(options.run_folder)} is a store of production"
        raise ConfigError(f"{source}: only a run has {options.what} to export")
    act(options)


def _as_given(name: str, value: Any) -> str:
    """An option as on the command line."""
    option = "-o" if name == "output" else f"--{name}"
    if value is True:
        return option
    return f"{option} {' '.join(value) if isinstance(value, list) else value}"


def _write(options: argparse.Namespace) -> None:
    from lightspan_tools.export import Filter, export_run, export_store

    query = read_query(options, options.run_folder)
    where = Path(options.run_folder)
    only = Filter(
        mode=None if options.mode is None else Mode(options.mode),
        agents=tuple(options.agent),
        min_reward=options.min_reward,
    )
    try:
        out = options.output or sys.stdout.buffer
        if query is None:
            done = export_run(where, options.what, out, format=options.format, only=only)
        else:
            url = options.run_folder
            done = export_store(
                url, options.what, out, format=options.format, only=only, query=query
            )
        sys.stdout.flush()
    except BrokenPipeError:  # `lightspan export … | head`
        sys.stderr.close()
        return
    except OSError as error:
        raise DataError(f"the output cannot be written: {error.strerror or error}") from error
    print_line(done.text(options.what, options.output), sys.stderr)


def _copy_model(options: argparse.Namespace) -> None:
    from lightspan.training.folder import RunFolder
    from lightspan.training.manifest import read_served
    from lightspan_torch.engine.hub import is_adapter

    run, out = RunFolder(Path(options.run_folder)), options.output
    served = read_served(run.read_result(), run.path).policies
    name = options.policy or next(iter(served))
    if name not in served or (options.policy is None and len(served) > 1):
        raise ConfigError(f"the run has the policies {', '.join(served)}: name one with --policy")
    if out is None:
        raise ConfigError("a model needs a folder: -o FOLDER")
    if os.path.lexists(out):  # `Path.exists` raises for a path that is too long
        raise ConfigError(f"{out} exists; a model goes into a new folder")
    source = run.path / served[name].folder
    if not source.is_dir():
        raise ConfigError(f"the run's model {source} is gone: put it back, or train again")
    if options.merge and not is_adapter(source):
        raise ConfigError(f"{source} is a whole model, no LoRA adapter: there is nothing to merge")
    # Renamed when it is whole: a model that was cut off would load, and answer nonsense.
    beside = out.with_name(f".{out.name}.part")
    shutil.rmtree(beside, ignore_errors=True)  # what a process left that was killed
    try:
        if options.merge:
            from lightspan_torch.learner.policy_model import merge_adapter

            merge_adapter(source, beside, base=served[name].model)
        else:
            shutil.copytree(source, beside)
        beside.rename(out)
    except OSError as error:
        raise DataError(
            f"the model {source} cannot be written to {out}: {_why(error)}; "
            "give another folder (-o FOLDER)"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    print_line(f"model of policy {name} to {out}", sys.stderr)


def _write_prompts(options: argparse.Namespace) -> None:
    from lightspan.training.folder import RunFolder

    run, out = RunFolder(Path(options.run_folder)), options.output
    run.read_config()  # which says what is wrong with a folder that is no run
    prompts = run.prompts()
    if not prompts:
        raise ConfigError(
            f"{run.path} has learned no prompt: prompts are learned by an algorithm such as GEPA, "
            "and written when its run ends"
        )
    if options.prompt is not None:
        if options.prompt not in prompts:
            known = ", ".join(prompts)
            raise ConfigError(f"the run has the prompts {known}, no {options.prompt!r}")
        prompts = {options.prompt: prompts[options.prompt]}
    if out is None:
        headed = len(prompts) > 1
        texts = [f"=== {n}\n{p.template}" if headed else p.template for n, p in prompts.items()]
        try:
            _print_exactly("\n".join(texts))
        except BrokenPipeError:  # `lightspan export … | head`
            sys.stderr.close()
        except OSError as error:
            raise DataError(f"the output cannot be written: {_why(error)}") from error
        return
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; prompts go into a new folder")
    try:
        out.mkdir(parents=True)
        for name, learned in prompts.items():
            # as the app fills it, to the letter: no line is added at its end
            file = out / f"{quote(name, safe=' ')}.txt"  # an agent's path has slashes
            file.write_text(learned.template, encoding="utf-8", newline="")
    except OSError as error:
        raise DataError(f"{out} cannot be written: {_why(error)}") from error
    print_line(f"{plural(len(prompts), 'prompt')} to {out}", sys.stderr)


def _print_exactly(text: str) -> None:
    """To another program as it is; on a terminal, what could steer it is shown instead."""
    if sys.stdout.isatty():
        print_line(text)
        return
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.flush()


def _why(error: OSError) -> str:
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][-1])  # of all the files that failed, the first
    return error.strerror or str(error)
