"""Start the web page as a user does, and look at it in a real Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

DATA = Path(__file__).parent / "data"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Page:
    """A running `lightspan ui`."""

    process: subprocess.Popen[str]
    address: str
    """The printed address, with the token."""

    @property
    def origin(self) -> str:
        return "http://" + urlsplit(self.address).netloc

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    def stop(self) -> int:
        """Press Ctrl-C and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=30)


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., Page]]:
    """Return a function that starts `lightspan ui` with arguments; all are stopped at the end."""
    pages: list[Page] = []

    def start(*arguments: str | Path) -> Page:
        words = [sys.executable, "-m", "lightspan.cli", "ui", *map(str, arguments), "--port", "0"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://\S+token=\S+", line):
                pages.append(Page(process, found[0]))
                return pages[-1]
        raise AssertionError(f"lightspan ui ended with {process.wait()}")

    yield start
    for page in pages:
        if page.process.poll() is None:
            page.process.kill()
        page.process.wait()
        if page.process.stdout is not None:
            page.process.stdout.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the committed runs (make_runs.py)."""
    folder = tmp_path_factory.mktemp("ui")
    with tarfile.open(DATA / "runs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "runs"


@dataclass
class Watched:
    """A page of the browser, and what went wrong in it."""

    page: Any
    problems: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        missing = (
            pytest.fail if "playwright" in os.environ.get("LIGHTSPAN_EXPECTED", "") else pytest.skip
        )
        missing("there is no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Watched]]:
    """Return a function that opens an address in a new window and notes everything suspicious.

    Suspicious are an error in the console, a report of the content policy, a dialog, and a request
    to another origin.
    """
    contexts = []

    def open_address(ui: Page, path: str = "/", **options: Any) -> Watched:
        context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        watched = Watched(page)
        note = watched.problems.append
        page.on("console", lambda m: m.type == "error" and note(f"console: {m.text}"))
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on("dialog", lambda dialog: (note(f"dialog: {dialog.message}"), dialog.dismiss()))

        def asked(request: Any) -> None:
            if not request.url.startswith((ui.origin, "data:")):
                note(f"request to {request.url}")

        page.on("request", asked)
        page.goto(ui.address)
        page.locator("nav a").first.wait_for()
        if path != "/":
            page.goto(ui.origin + path)
        return watched

    yield open_address
    for context in contexts:
        context.close()
