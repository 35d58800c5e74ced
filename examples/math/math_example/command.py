"""The command line of the app."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from openai import OpenAIError

from math_example.app import (
    DEFAULT_MODEL,
    MAX_CALLS,
    MODEL_VARIABLE,
    SERVER_VARIABLE,
    calculator,
    chat_client,
    solve,
)

_EPILOG = f"""\
environment:
  OPENAI_API_KEY   the endpoint's key; any text if the endpoint wants none
  OPENAI_BASE_URL  an OpenAI-compatible endpoint; api.openai.com if unset
  {SERVER_VARIABLE}     a running calculator, as --mcp-url
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Solve one problem and print the reply; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not os.environ.get("OPENAI_API_KEY"):
        parser.error(
            "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL for an endpoint other than "
            "api.openai.com (a local endpoint takes any key)"
        )
    if options.max_calls < 1:
        parser.error(f"--max-calls is {options.max_calls}; the model has to be asked at least once")
    return asyncio.run(_answer(options))


async def _answer(options: argparse.Namespace) -> int:
    client = chat_client(options.model, temperature=options.temperature)
    try:
        async with calculator(options.mcp_url) as workbench:
            reply = await solve(options.problem, client, workbench, max_calls=options.max_calls)
    except OpenAIError as error:
        endpoint = os.environ.get("OPENAI_BASE_URL") or "api.openai.com"
        print(f"{endpoint} did not answer: {error}", file=sys.stderr)
        return 1
    finally:
        await client.close()
    if not reply:
        print(f"no answer within {options.max_calls} calls of the model", file=sys.stderr)
        return 1
    print(reply)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Solve a word problem with a calculator: prints the agent's reply.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("problem", help='for example "Ada has 12 plums and buys 5. How many?"')
    parser.add_argument(
        "--model", help=f"the model's name (default: ${MODEL_VARIABLE}, else {DEFAULT_MODEL})"
    )
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    parser.add_argument(
        "--max-calls", type=int, default=MAX_CALLS, help="of the model, at most (%(default)s)"
    )
    parser.add_argument(
        "--mcp-url", metavar="URL", help="a calculator that runs already, instead of one beside it"
    )
    return parser
