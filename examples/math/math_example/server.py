"""The calculator as an MCP server.

python -m math_example.server                                over stdio
python -m math_example.server --http --port 8765             over streamable HTTP, on /mcp
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mcp.server.fastmcp import FastMCP
from mcp.server.fastmcp.exceptions import ToolError

from math_example.calculator import CalculatorError, evaluate, format_number

NAME = "calculator"
DESCRIPTION = "Evaluate arithmetic exactly."


def make_server(*, host: str = "127.0.0.1", port: int = 8765) -> FastMCP:
    """Return the MCP server; `host` and `port` are used with HTTP only."""
    # a line on stderr for each request would drown what else is printed there
    server = FastMCP(NAME, host=host, port=port, log_level="WARNING", stateless_http=True)
    server.add_tool(calculate, NAME, description=DESCRIPTION, structured_output=False)
    return server


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as text.

    Raises:
        ToolError: the expression cannot be evaluated.
    """
    try:
        return format_number(evaluate(expression))
    except CalculatorError as error:
        raise ToolError(str(error)) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until the client closes stdin, or until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m math_example.server", description="A calculator over MCP."
    )
    parser.add_argument("--http", action="store_true", help="streamable HTTP instead of stdio")
    parser.add_argument("--host", default="127.0.0.1", help="with --http (%(default)s)")
    parser.add_argument("--port", type=int, default=8765, help="with --http (%(default)s)")
    options = parser.parse_args(arguments)
    server = make_server(host=options.host, port=options.port)
    server.run("streamable-http" if options.http else "stdio")


if __name__ == "__main__":
    main()
