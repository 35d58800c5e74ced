"""The command `lightspan serve`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightspan.errors import ConfigError
from lightspan_gateway.remote_store.roles import Role

_RUN_OPTIONS: Final = (
    *("device", "dtype", "api_key_env", "max_tokens"),
    *("upstream", "upstream_key_env", "allow_upstream", "image_host"),
    *("candidate", "share", "candidate_state"),
)
_STORE_OPTIONS: Final = (*(f"{role}_key_env" for role in Role), "without_key")
_ROLE_HELP: Final = {
    Role.ADMIN: "administrators, which may do everything",
    Role.TRAINER: "trainers, which enqueue rollouts and read their results",
    Role.RUNNER: "runners, which claim, record and report",
    Role.READER: "readers, which look at runs and change nothing",
    Role.TRACER: "apps and collectors, which send OpenTelemetry traces and read nothing",
}


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve the policies of a complete run, or a model, to apps; or a store over HTTP",
        description="Serve the trained policies of a run at one endpoint, for the clients of "
        "OpenAI and Anthropic, with the agents mapped as in training, and print the one line to "
        "change in the app. Or serve a model in a Hugging Face folder, which answers every agent. "
        "Sampling is set by the request. Unsupported fields that may say how to sample are "
        "refused; others (such as verbosity) are ignored and counted. With "
        "--store serve a store instead: trainers and runners on other machines open it by its "
        "URL, each with a key that limits its permissions. It speaks plain HTTP: put a proxy with "
        "TLS in front of it.",
    )
    parser.add_argument(
        "run_folder",
        type=Path,
        nargs="?",
        metavar="RUN|MODEL",
        help="the folder of a run, such as runs/sql, or of a model",
    )
    parser.add_argument("--host", default="127.0.0.1", help="interface (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 for a free one (8000)")
    parser.add_argument("--device", default="cpu", help='"cpu", "cuda" or "cuda:1" (cpu)')
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="data type of the weights (auto: as stored)",
    )
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="the variable with the key that callers must send; required for other hosts",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="limit of an answer if a chat request sets none (the rest of the context)",
    )
    parser.add_argument(
        "--upstream", metavar="URL", help="an endpoint for calls that the policies do not answer"
    )
    parser.add_argument(
        "--upstream-key-env", metavar="NAME", help="the variable with the upstream's key"
    )
    parser.add_argument(
        "--allow-upstream",
        metavar="URL",
        action="append",
        default=[],
        help="an endpoint that may answer the run's frozen agents, with the key in its variable "
        "(repeatable)",
    )
    parser.add_argument(
        "--image-host",
        metavar="HOST",
        action="append",
        default=[],
        help="a host from which images are fetched whose addresses are in calls (repeatable)",
    )
    group = parser.add_argument_group(
        "a candidate",
        "A second run or model answers a share of attempts, until `lightspan candidate promote` or "
        "`roll-back`. --admin-key-env names the key that may decide over HTTP.",
    )
    group.add_argument(
        "--candidate", type=Path, metavar="RUN|MODEL", help="the folder of the newer run or model"
    )
    group.add_argument(
        "--share",
        type=float,
        metavar="FRACTION",
        help="share of attempts that the candidate answers, between 0 and 1 (0.1)",
    )
    group.add_argument(
        "--candidate-state",
        type=Path,
        metavar="FILE",
        help="file that keeps the comparison (candidate.db in the served folder)",
    )
    group = parser.add_argument_group("a store", "Keys are read from the variables named here.")
    group.add_argument(
        "--store", metavar="URL", help="a SQLite file or a PostgreSQL database, instead of a folder"
    )
    for role, text in _ROLE_HELP.items():
        group.add_argument(
            f"--{role}-key-env", metavar="NAME", help=f"the variable with the key of {text}"
        )
    group.add_argument(
        "--without-key",
        action="store_true",
        help="accept every program of this machine; requires --host to be a loopback address",
    )
    parser.set_defaults(run=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not 0 <= options.port <= 65_535:
        raise ConfigError(f"--port {options.port} is no port: give one from 1 to 65535, or 0")
    is_store = options.store is not None
    if (options.run_folder is None) != is_store:
        raise ConfigError(
            "name what to serve, the folder of a run or a model, or --store URL: here "
            f"{'both are' if is_store else 'neither is'} given"
        )
    for name in _RUN_OPTIONS if is_store else _STORE_OPTIONS:
        if name == "admin_key_env" and options.candidate is not None:
            continue
        if getattr(options, name) != parser.get_default(name):
            kind = "a run or a model" if is_store else "a store (--store)"
            raise ConfigError(f"--{name.replace('_', '-')} applies to {kind} only")
    if is_store:
        _serve_store(options)
    else:
        _serve_run(options)


def _serve_store(options: argparse.Namespace) -> None:
    from lightspan_gateway.http_server import raise_file_limit
    from lightspan_gateway.store_server.main import StoreOptions, serve_store

    raise_file_limit()
    variables = {role: getattr(options, f"{role}_key_env") for role in Role}
    serve_store(
        StoreOptions(
            url=options.store,
            host=options.host,
            port=options.port,
            key_variables={role: name for role, name in variables.items() if name},
            without_key=options.without_key,
        )
    )


def _serve_run(options: argparse.Namespace) -> None:
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigError(f"--max-tokens {options.max_tokens} must be at least 1")
    from lightspan_gateway.serving.endpoint import ServeOptions, serve

    if options.candidate is None:
        for name in ("share", "candidate_state"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} applies to --candidate only")
    elif options.share is not None and not 0 < options.share < 1:
        raise ConfigError(f"--share {options.share:g} must be above 0 and below 1, such as 0.1")
    names = ("host", "port", *_RUN_OPTIONS, "admin_key_env")
    settings = {name: getattr(options, name) for name in names}
    serve(options.run_folder, ServeOptions(**settings))
