"""Check that texts of models, users and files stay texts in the page."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ui.production import ATTACKS

pytestmark = pytest.mark.timeout(300)  # a store with a text of 10 MB, beside other programs

RUN = "<img src=x onerror=alert(1)> & 'run'"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "app.db"
    script = Path(__file__).with_name("production.py")
    subprocess.run([sys.executable, script, path], check=True)
    return path


@pytest.fixture(scope="module")
def ui(
    serve: Callable[..., Any], runs: Path, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copytree(runs / "sql", folder / RUN)
    config = folder / RUN / "config.json"
    config.write_text(config.read_text().replace("sqlite", "<script>alert(1)</script>", 1))
    return serve(folder, f"sqlite:{store}", "--write")


def test_texts_stay_texts(ui: Any, look: Callable[..., Any]) -> None:
    watched = look(ui)
    page = watched.page
    page.get_by_text("<img src=x onerror=alert(1)>").first.wait_for()
    page.locator("nav a", has_text="app").click()
    page.locator(".entry").first.wait_for()
    entries = page.locator(".entry")
    for number in range(min(entries.count(), len(ATTACKS) + 2)):
        entries.nth(number).locator("a").first.click()
        page.locator("article.span").first.wait_for()
        page.wait_for_timeout(100)
    assert "broken" not in page.title()
    foreign = "main script, main img, main iframe, main svg[onload], main a[href^='javascript']"
    assert page.locator(foreign).count() == 0
    assert page.locator("main [onmouseover]").count() == 0
    assert "<script>" in page.locator("main").inner_text()
    assert "\u202e" not in page.locator("main").inner_text()
    assert watched.problems == []


def test_a_long_text_is_cut(ui: Any, look: Callable[..., Any]) -> None:
    watched = look(ui)
    page = watched.page
    page.locator("nav a", has_text="app").click()
    page.locator(".entry", has_text="long long").first.locator("a").first.click()
    page.get_by_text("cut: the span's page has the rest").first.wait_for()
    assert len(page.locator("main").inner_text()) < 2_000_000
    assert watched.problems == []


def test_it_offers_to_train_on_what_is_listed(ui: Any, look: Callable[..., Any]) -> None:
    watched = look(ui)
    page = watched.page
    page.locator("nav a", has_text="app").click()
    page.get_by_text("more", exact=True).click()
    page.get_by_label("seconds from").fill("1000")
    page.get_by_label("seconds from").press("Enter")
    page.wait_for_url("**seconds_min=1000**")
    page.get_by_text("No rollout matches.").wait_for()
    page.get_by_text("Train on what is listed").click()
    page.get_by_text("from lightspan_torch import Preferences").wait_for()
    assert page.get_by_text("no such filter: seconds_min").count() == 1
    assert page.get_by_text("has such a filter: seconds_min").count() > 0
    assert watched.problems == []


def test_a_rating_is_there_at_once(ui: Any, look: Callable[..., Any], store: Path) -> None:
    first, second = look(ui).page, look(ui).page
    for page in (first, second):
        page.locator("nav a", has_text="app").click()
        page.locator(".entry").first.wait_for()
    first.locator(".entry a").first.click()
    first.get_by_label("comment").fill("<b>kind</b> words")
    first.get_by_role("button", name="good").click()
    first.get_by_text("rated 1.00").wait_for()
    second.locator(".entry", has_text="1.00").first.wait_for()
    command = [sys.executable, "-m", "lightspan.cli", "inspect", str(store)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert sum(line.split()[5] == "1" for line in text.splitlines() if " shop " in line) == 1
