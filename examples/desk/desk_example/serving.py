"""Serve the model that answers the app: `lightspan serve MODEL_FOLDER` in a child process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightspan.errors import ModelError


@contextmanager
def served(model: Path) -> Iterator[tuple[str, str]]:
    """Serve a model within the block; yield the URL of its endpoint and the model's name there.

    Raises:
        ModelError: `model` cannot be served.
    """
    command = [sys.executable, "-m", "lightspan.cli", "serve", str(model), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    lines: list[str] = []
    named: re.Match[str] | None = None
    try:
        for line in process.stdout:
            lines.append(line)
            named = re.search(r"base_url=\S+, model=(\S+)", line) or named
            if named and (ready := re.match(r"serving .* at (http\S+/v1) ", line)):
                break
        else:
            raise ModelError(f"{model} cannot be served: {''.join(lines).strip()}")
        yield ready[1], named[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@contextmanager
def app_asks(url: str, model: str, key: str = "unused") -> Iterator[None]:
    """Set the environment variables within the block so that the app calls the endpoint `url`."""
    names = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "DESK_MODEL": model}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
