"""`lightspan serve`: the trained policies, or a model, at one OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightspan.errors import ConfigError


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve the policies of a complete run, or a model, to apps",
        description="Serve the trained policies of a run at one endpoint, for OpenAI's clients and "
        "Anthropic's, agents mapped as trained, and print the one line to change in the app. Or a "
        "model without a run, in a folder as Hugging Face has it, which answers every agent. "
        "Sampling is what a request says; what cannot be honoured is refused, but for settings "
        "that only one provider's models have (such as verbosity): these are set aside, and "
        "counted.",
    )
    parser.add_argument(
        "run_folder",
        type=Path,
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
        help="an endpoint of the run's own that calls may go to, with the key of its variable; "
        "needed for a run that you have not trained here (repeatable)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigError(f"--max-tokens {options.max_tokens} must be at least 1")
    if not 0 <= options.port <= 65_535:
        raise ConfigError(f"--port {options.port} is no port: give one from 1 to 65535, or 0")
    from lightspan.serving.endpoint import ServeOptions, serve

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
