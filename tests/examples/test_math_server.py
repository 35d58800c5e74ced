"""Test the calculator's MCP server in a process, over stdio and HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="the MCP library is in the environment of AutoGen's tests")

from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent

PACKAGE = Path(__file__).parents[2] / "examples" / "math"
ARGUMENTS = ["-P", "-m", "math_example.server"]


async def call(session: ClientSession, expression: object) -> tuple[str, bool]:
    """Call the tool; return its text, and whether it is marked as an error."""
    return said(await session.call_tool("calculator", {"expression": expression}))


def said(result: CallToolResult) -> tuple[str, bool]:
    assert result.structuredContent is None
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text, result.isError


def test_the_server_ends_when_stdin_closes_and_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, *ARGUMENTS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@contextmanager
def http_server() -> Iterator[str]:
    """Run a server; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, *ARGUMENTS, "--http", "--port", str(port)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            _wait_until_open(port, server)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.terminate()
            server.communicate(timeout=30)


def _wait_until_open(port: int, server: subprocess.Popen[str]) -> None:
    while server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"the server ended: {server.stderr and server.stderr.read()}")


async def test_the_tool_over_http() -> None:
    with http_server() as url:
        async with (
            streamable_http_client(url) as (read, write, _),
            ClientSession(read, write, timedelta(seconds=30)) as session,
        ):
            await session.initialize()
            assert await call(session, "(12 + 5) * 3") == ("51", False)
            text = "Error executing tool calculator: 9**387420489 is too large"
            assert await call(session, "9**9**9") == (text, True)
