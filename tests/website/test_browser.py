"""Look at the built documentation in a real browser: `nox -s docs`, then this file.

It needs playwright, axe-playwright-python, Chromium and the folder site/, and is skipped without.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGES = (
    *("", "start/your-own-app/", "guides/langgraph/", "guides/resume/", "troubleshooting/"),
    *("reference/settings/", "reference/cli/", "reference/api/training/", "examples/", "faq/"),
)
RESULTS = "a[href*='?q='], .md-search a[href], [role=search] a[href], dialog a[href]"
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or not (SITE / "index.html").exists(), reason="no Chromium, or no site"
)


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Do not log."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("resume", "guides/resume/"),
        ("rewards are all zero", "troubleshooting/|faq/"),
        ("LoRA vLLM", "guides/export/|guides/vllm/"),
    ],
)
def test_search_finds(address: str, browser: Any, query: str, page: str) -> None:
    """Check that one of the first five results is a page that answers the query."""
    view = browser.new_page()
    view.goto(address)
    view.keyboard.press("/")
    view.keyboard.type(query)
    links: list[str] = []
    for _ in range(40):
        view.wait_for_timeout(250)
        before, links = links, view.eval_on_selector_all(RESULTS, "all => all.map(a => a.href)")
        if links and links == before:
            break
    view.close()
    shown = [link for link in links if link.startswith(address)][:5]
    assert any(wanted in link for link in shown for wanted in page.split("|")), shown


@pytest.mark.parametrize("page", PAGES)
def test_a_narrow_window_scrolls_down_only(address: str, browser: Any, page: str) -> None:
    view = browser.new_page(viewport={"width": 400, "height": 800})
    view.goto(address + page)
    width = view.evaluate("document.documentElement.scrollWidth")
    view.close()
    assert width <= 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing_serious(address: str, browser: Any, page: str, scheme: str) -> None:
    view = browser.new_page(color_scheme=scheme)
    view.goto(address + page)
    violations = axe.Axe().run(view).response["violations"]
    view.close()
    serious = [each for each in violations if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in serious] == []
