"""`lightspan export`: export recordings, models and prompts for other programs."""

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
_APPLIES_TO: Final[Mapping[str, tuple[str, ...]]] = {
    "output": (*_FILES, "model", "prompts"),
    "format": _FILES,
    "mode": _FILES,
    "agent": _CALLS,
    "min-reward": _FILES,
    "images": ("messages",),
    "merge": ("model",),
    "policy": ("model",),
    "prompt": ("prompts",),
}
"""Option → the exports that it applies to; `_query` has the options of a store."""


def add(commands: Any) -> None:
    """Add the subcommand `export`."""
    parser = commands.add_parser(
        "export",
        help="write spans, transitions, chats, prompts or the model",
        description="Write the recordings of a run or of production as JSONL or Parquet: every "
        "span, every call of a trained agent as token ids with log-probabilities, reward and "
        "advantage (transitions), every call as chat messages, or the inputs of attempts as tasks. "
        "Or copy a run's trained model, or write its learned prompts as plain texts.",
    )
    parser.add_argument(
        "run_folder",
        metavar="RUN",
        help="a folder such as runs/sql, or the store of production, such as sqlite:app.db",
    )
    parser.add_argument(
        "what", choices=[*_FILES, "model", "prompts"], help="model and prompts: of a run only"
    )
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="PATH",
        help="a file (standard output if absent), or a new folder for the model or for prompts, "
        "one file each",
    )
    parser.add_argument(
        "--format",
        choices=["jsonl", "parquet"],
        help="format (by the file's name, else jsonl); not for the model",
    )
    parser.add_argument(
        "--mode",
        choices=[str(mode) for mode in Mode],
        help="only rollouts of this mode (all); not for the model",
    )
    parser.add_argument(
        "--agent",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only calls of an agent, by a name or a glob on paths; for transitions and messages; "
        "may be repeated",
    )
    parser.add_argument(
        "--min-reward",
        type=float,
        metavar="R",
        help="only rollouts with at least this reward; not for the model",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="put the recorded images into messages, as parts of OpenAI's chats with a data: URL: "
        '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}. Without it, '
        "messages have type, size and SHA-256 of an image",
    )
    add_query(parser)
    parser.add_argument(
        "--merge", action="store_true", help="merge the LoRA adapter into its base; for the model"
    )
    parser.add_argument("--policy", help="policy to export, if the run has several")
    parser.add_argument("--prompt", metavar="NAME", help="name of a prompt (all)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    for name, exports in _APPLIES_TO.items():
        value = getattr(options, name.replace("-", "_"))
        is_set = value is not None and value is not False and value != []  # 0.0 is a value
        if is_set and options.what not in exports:
            raise ConfigError(
                f"{_option_text(name, value)} applies only to {', '.join(exports)}, not to "
                f"{options.what}: leave it out"
            )
    acts = {"model": _copy_model, "prompts": _write_prompts}
    act = acts.get(options.what, _write)
    if read_query(options, options.run_folder) is not None and act is not _write:
        source = f"{public_url(options.run_folder)} is a store of production"
        raise ConfigError(f"{source}: only a run has {options.what} to export")
    try:
        act(options)
    except BrokenPipeError:  # `lightspan export … | head`
        sys.stderr.close()
    except OSError as error:
        raise DataError(f"the output cannot be written: {_reason(error)}") from error


def _option_text(name: str, value: Any) -> str:
    """Return an option with its value as a user would write them on the command line."""
    option = "-o" if name == "output" else f"--{name}"
    if value is True:
        return option
    return f"{option} {' '.join(value) if isinstance(value, list) else value}"


def _write(options: argparse.Namespace) -> None:
    from lightspan_tools.export import Filter, export_run, export_store

    query = read_query(options, options.run_folder)
    source, what = options.run_folder, options.what
    only = Filter(
        mode=None if options.mode is None else Mode(options.mode),
        agents=tuple(options.agent),
        min_reward=options.min_reward,
        images=options.images,
    )
    out = options.output or sys.stdout.buffer
    if query is None:
        summary = export_run(Path(source), what, out, format=options.format, only=only)
    else:
        summary = export_store(source, what, out, format=options.format, only=only, query=query)
    sys.stdout.flush()
    print_line(summary.text(what, options.output), sys.stderr)


def _copy_model(options: argparse.Namespace) -> None:
    from lightspan.training.folder import RunFolder
    from lightspan_gateway.serving.served_run import read_served
    from lightspan_torch.engine.hub import is_adapter

    run, out = RunFolder(Path(options.run_folder)), options.output
    served = read_served(run.read_result(), run.path).policies
    name = options.policy or next(iter(served))
    if name not in served or (options.policy is None and len(served) > 1):
        raise ConfigError(f"the run has the policies {', '.join(served)}: name one with --policy")
    if out is None:
        raise ConfigError("a model needs a folder: -o FOLDER")
    if os.path.lexists(out):  # `Path.exists` raises for an overlong path
        raise ConfigError(f"{out} exists; a model goes into a new folder")
    source = run.path / served[name].folder
    if not source.is_dir():
        raise ConfigError(f"the run's model {source} is gone: put it back, or train again")
    if options.merge and not is_adapter(source):
        raise ConfigError(f"{source} is a whole model, no LoRA adapter: there is nothing to merge")
    # An incomplete model would load and answer nonsense, so the copy is renamed when complete.
    temporary = out.with_name(f".{out.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        if options.merge:
            from lightspan_torch.learner.policy_model import merge_adapter

            merge_adapter(source, temporary, base=served[name].model)
        else:
            shutil.copytree(source, temporary)
        temporary.rename(out)
    except OSError as error:
        raise DataError(
            f"the model {source} cannot be written to {out}: {_reason(error)}; "
            "give another folder (-o FOLDER)"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print_line(f"model of policy {name} to {out}", sys.stderr)


def _write_prompts(options: argparse.Namespace) -> None:
    from lightspan.training.folder import RunFolder
    from lightspan_tools.placeholders import placeholder_note, text_to_paste

    run, out = RunFolder(Path(options.run_folder)), options.output
    run.read_config()  # raises if the folder holds no run
    prompts = run.prompts()
    if not prompts:
        raise ConfigError(
            f"{run.path} has learned no prompt: prompts are learned by an algorithm such as GEPA, "
            "and written when its run ends"
        )
    if options.prompt is not None:
        if options.prompt not in prompts:
            names = ", ".join(prompts)
            raise ConfigError(f"the run has the prompts {names}, no {options.prompt!r}")
        prompts = {options.prompt: prompts[options.prompt]}
    for name, prompt in prompts.items():
        if note := placeholder_note(prompt):
            print_line(f"prompt {name}: {note}", sys.stderr)
    texts_of = {name: text_to_paste(name, prompt) for name, prompt in prompts.items()}
    if out is None:
        texts = list(texts_of.values())
        if len(texts) > 1:
            texts = [f"=== {name}\n{text}" for name, text in texts_of.items()]
        text = "\n".join(texts)
        if sys.stdout.isatty():
            print_line(text)  # escapes control characters
        else:
            sys.stdout.buffer.write(text.encode() + b"\n")
            sys.stdout.flush()
        return
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; prompts go into a new folder")
    try:
        out.mkdir(parents=True)
        for name, text in texts_of.items():
            file = out / f"{quote(name, safe=' ')}.txt"  # an agent's path has slashes
            # exactly, without a final newline
            file.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise DataError(f"{out} cannot be written: {_reason(error)}") from error
    print_line(f"{plural(len(prompts), 'prompt')} to {out}", sys.stderr)


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][-1])  # the first file that failed
    return error.strerror or str(error)
