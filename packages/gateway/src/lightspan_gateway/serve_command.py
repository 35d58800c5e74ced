"""`lightspan serve`: trained policies or a model, at one OpenAI-compatible endpoint; or a store."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from lightspan.errors import ConfigError
from lightspan_gateway.remote_store.roles import Role

_OF_RUNS: Final[dict[str, Any]] = {
    "device": "cpu",
    "dtype": "auto",
    "api_key_env": None,
    "max_tokens": None,
    "upstream": None,
    "upstream_key_env": None,
    "allow_upstream": [],
}
_OF_STORES: Final[dict[str, Any]] = {
    **{f"{role}_key_env": None for role in Role},
    "without_key": False,
}


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve the policies of a complete run, or a model, to apps; or a store over HTTP",
        description="Serve the trained policies of a run at one endpoint, for OpenAI's clients and "
        "Anthropic's, agents mapped as trained, and print the one line to change in the app. Or a "
        "model without a run, in a folder as Hugging Face has it, which answers every agent. "
        "Sampling is what a request says; what cannot be honoured is refused, but for settings "
        "that only one provider's models have (such as verbosity): these are set aside, and "
        "counted. With --store a store instead: trainers and runners of other machines open it as "
        "https://HOST:PORT, each with a key that says what it may do.",
    )
    parser.add_argument(
        "run_folder",
        type=Path,
        nargs="?",
        metavar="RUN|MODEL",
        help="a folder: of a run, such as runs/sql, or of a model",
    )
    parser.add_argument("--host", default="127.0.0.1", help="interface (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (8000)")
    parser.add_argument("--device", default="cpu", help='"cpu", "cuda" or "cuda:1" (cpu)')
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the weights (as the folder has them)",
    )
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="the variable with the key that callers must send; needed for other hosts",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="of an answer, where a chat request does not say (what the context leaves)",
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
        help="an endpoint that the run's frozen agents may be answered by, with the key of its "
        "variable (repeatable)",
    )
    _add_store(parser)
    parser.set_defaults(run=_run)


def _add_store(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a store", "Keys are read from the variables named here.")
    group.add_argument(
        "--store",
        metavar="URL",
        help="a SQLite file or a PostgreSQL database, in place of a folder",
    )
    for role in Role:
        group.add_argument(
            f"--{role}-key-env",
            metavar="NAME",
            help=f"the variable with the key of {role.may}",
        )
    group.add_argument(
        "--without-key",
        action="store_true",
        help="let in every program of this machine, with --host at a loopback address only",
    )


def _run(options: argparse.Namespace) -> None:
    if not 0 <= options.port <= 65_535:
        raise ConfigError(f"--port {options.port} is no port: give one from 1 to 65535, or 0")
    _check_kind(options)
    if options.store is None:
        _serve_run(options)
    else:
        _serve_store(options)


def _check_kind(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for both kinds of server, for none, and for what the other kind takes."""
    if (options.run_folder is None) == (options.store is None):
        found = "neither is" if options.store is None else "both are"
        raise ConfigError(
            "name what to serve, the folder of a run or a model, or --store URL: here "
            f"{found} given"
        )
    others = _OF_RUNS if options.store is not None else _OF_STORES
    for name, default in others.items():
        if getattr(options, name) != default:
            kind = "a run or a model" if options.store is not None else "a store (--store)"
            raise ConfigError(f"--{name.replace('_', '-')} applies to {kind} only")


def _serve_store(options: argparse.Namespace) -> None:
    from lightspan_gateway.http_server import raise_file_limit
    from lightspan_gateway.store_server.main import StoreOptions, serve_store

    raise_file_limit()
    serve_store(
        StoreOptions(
            url=options.store,
            host=options.host,
            port=options.port,
            key_variables={
                role: name for role in Role if (name := getattr(options, f"{role}_key_env"))
            },
            without_key=options.without_key,
        )
    )


def _serve_run(options: argparse.Namespace) -> None:
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigError(f"--max-tokens {options.max_tokens} must be at least 1")
    from lightspan_gateway.serving.endpoint import ServeOptions, serve

    serve(
        options.run_folder,
        ServeOptions(
            host=options.host,
            port=options.port,
            device=options.device,
            dtype=options.dtype,
            api_key_env=options.api_key_env,
            max_tokens=options.max_tokens,
            upstream=options.upstream,
            upstream_key_env=options.upstream_key_env,
            allow_upstreams=options.allow_upstream,
        ),
    )
