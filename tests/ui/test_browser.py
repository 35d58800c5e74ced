"""Use the web page in a real browser (Debian's Chromium): `nox -s ui`."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUN, SEARCH = "sql", "prompts"
Serve, Look = Callable[..., Any], Callable[..., Any]


@pytest.fixture(scope="module")
def ui(serve: Serve, runs: Path) -> Any:
    return serve(runs)


def _rollout(runs: Path, where: str = "mode = 'train'") -> str:
    with sqlite3.connect(runs / RUN / "store.db") as database:
        query = f"SELECT rollout_id FROM rollouts WHERE {where} ORDER BY position LIMIT 1"
        return str(database.execute(query).fetchone()[0])


def _after(page: Any, act: Callable[[], object], part: str) -> None:
    """Act, and wait until the table shows the answer to a request whose address has a part."""
    with page.expect_response(
        lambda response: "/rollouts?" in response.url and part in response.url
    ):
        act()
    page.get_by_text("looking…").wait_for(state="detached")
    page.locator("tbody tr").first.wait_for()


def _call(page: Any) -> str:
    """Return the path of the first call that an open rollout links to."""
    link = page.locator("article.span a[href*='/calls/']").first
    link.wait_for()
    return str(link.get_attribute("href"))


def _paths(page: Any, ui: Any, runs: Path) -> list[str]:
    rollout = f"/runs/{RUN}/rollouts/{_rollout(runs)}"
    page.goto(ui.origin + rollout)
    call = _call(page)
    return [
        "/",
        f"/compare?run={RUN}&run={SEARCH}",
        f"/runs/{RUN}",
        f"/runs/{RUN}/settings",
        f"/runs/{RUN}/rollouts",
        f"/runs/{RUN}/groups",
        rollout,
        call,
        f"/runs/{SEARCH}/prompts?candidate=1",
    ]


def test_the_token_leaves_the_address(ui: Any, look: Look) -> None:
    watched = look(ui)
    assert "token" not in watched.page.url
    [cookie] = watched.page.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert watched.problems == []


def test_a_link_in_a_notebook_opens_the_page(ui: Any, browser: Any) -> None:
    context = browser.new_context()
    notebook = context.new_page()
    link = f'<a href="{ui.address}" target="_blank">{ui.address}</a>'
    # to a browser, localhost is another site than 127.0.0.1
    notebook.route(
        "http://localhost/", lambda route: route.fulfill(body=link, content_type="text/html")
    )
    notebook.goto("http://localhost/")
    with notebook.expect_popup() as opened:
        notebook.locator("a").click()
    page = opened.value
    page.locator("main tbody tr").first.wait_for()
    assert page.url == f"{ui.origin}/"
    assert page.evaluate("history.length") == 1
    context.close()


def test_runs_are_listed_with_their_gain(ui: Any, look: Look) -> None:
    watched = look(ui)
    row = watched.page.locator("tbody tr", has_text=RUN).first
    row.wait_for()
    assert "finished" in row.inner_text()
    assert re.search(r"[+−]\d\.\d\d\s+\S+ to \S+", row.inner_text())
    assert watched.problems == []


def test_two_runs_are_compared(ui: Any, look: Look) -> None:
    page = look(ui).page
    boxes = page.locator("tbody input[type=checkbox]")
    boxes.first.wait_for()
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.get_by_role("link", name="compare 2 runs").click()
    page.get_by_role("heading", name="Settings that differ").wait_for()
    assert page.get_by_role("rowheader", name="algorithm").count() == 1


def test_filters_order_and_page_are_in_the_address(ui: Any, look: Look) -> None:
    watched = look(ui, f"/runs/{RUN}/rollouts?mode=train&sort=worst&limit=5")
    page = watched.page
    page.locator("tbody tr").first.wait_for()
    _after(page, page.get_by_role("link", name="next page").click, "cursor=")
    rows = page.locator("tbody").inner_text()
    _after(page, page.reload, "cursor=")
    assert page.locator("tbody").inner_text() == rows
    rewards = [float(text) for text in page.locator("tbody .reward .number").all_inner_texts()]
    assert rewards == sorted(rewards)
    _after(page, page.go_back, "limit=5")
    assert "cursor" not in page.url
    page.get_by_label("mode").select_option("val")
    page.wait_for_url("**mode=val**")
    assert "cursor" not in page.url
    assert watched.problems == []


def test_text_is_found(ui: Any, look: Look) -> None:
    page = look(ui, f"/runs/{RUN}/rollouts").page
    page.get_by_role("searchbox").fill("no such text anywhere")
    page.get_by_role("searchbox").press("Enter")
    page.get_by_text("No rollout matches.").wait_for()
    page.get_by_role("searchbox").fill("SELECT")
    page.get_by_role("searchbox").press("Enter")
    page.locator("tbody tr").first.wait_for()


def test_a_search_goes_on_by_itself(ui: Any, look: Look) -> None:
    watched = look(ui, f"/runs/{RUN}/rollouts")
    page, asked = watched.page, list[str]()

    def answer(route: Any) -> None:
        """Answer twice as the API does when its time was over."""
        asked.append(route.request.url)
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "is_partial": len(asked) < 3})

    page.route(re.compile(r"/rollouts\?.*text="), answer)
    page.get_by_role("searchbox").fill("no such text anywhere")
    page.get_by_role("searchbox").press("Enter")
    page.get_by_text("No rollout matches.").wait_for()
    assert len(asked) == 3
    assert watched.problems == []


def test_a_rollout_is_opened_by_keys(ui: Any, look: Look) -> None:
    watched = look(ui, f"/runs/{RUN}/rollouts?mode=train")
    page = watched.page
    page.locator("tbody tr").first.wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.locator(".tree button").first.wait_for()
    page.locator(".tree button").first.focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_url("**span=**")
    page.reload()
    page.locator(".tree button[aria-pressed=true]").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_url(f"**/runs/{RUN}/rollouts**")
    assert watched.problems == []


def test_a_call_says_why(ui: Any, look: Look, runs: Path) -> None:
    watched = look(ui, f"/runs/{RUN}/rollouts/{_rollout(runs)}")
    page = watched.page
    page.goto(ui.origin + _call(page))
    page.get_by_role("heading", name="Answer").wait_for()
    text = page.locator("main").inner_text()
    assert "advantage" in text
    assert "on average; this rollout's return was" in text
    assert page.locator(".tokens span").count() > 3
    page.get_by_role("button", name="policy version").click()
    page.wait_for_url("**color=version**")
    assert watched.problems == []


def test_a_chart_is_read_by_keys_and_as_a_table(ui: Any, look: Look) -> None:
    watched = look(ui, f"/runs/{RUN}")
    page = watched.page
    chart = page.locator("figure svg").first
    chart.wait_for()
    assert "from" in str(chart.get_attribute("aria-label"))
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert "step 0" in page.locator(".tip").inner_text()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="table").first.click()
    assert page.locator("figure table tbody tr").count() > 3
    assert watched.problems == []


def test_a_prompt_search_shows_its_candidates(ui: Any, look: Look) -> None:
    watched = look(ui, f"/runs/{SEARCH}/prompts")
    page = watched.page
    page.locator(".tree button").nth(1).click()
    page.wait_for_url("**candidate=1**")
    page.reload()
    page.get_by_role("heading", name="Candidate 1").wait_for()
    assert page.locator(".difference .added").count() > 0
    assert page.locator("table.heat tbody tr").count() > 1
    page.get_by_role("heading", name="Proposals, refused ones too").wait_for()
    assert watched.problems == []


def test_a_step_appears_by_itself(serve: Serve, look: Look, runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "live"
    shutil.copytree(runs / RUN, folder)
    (folder / "result.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = next(n for n in reversed(range(len(lines))) if '"kind":"train"' in lines[n])
    (folder / "metrics.jsonl").write_text("".join(lines[:last]))
    page = look(serve(tmp_path / "runs"), "/runs/live").page
    steps = int(json.loads(lines[last])["step"])
    page.get_by_text(f"{steps - 1} of").first.wait_for()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(lines[last])
    page.get_by_text(f"{steps} of").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_hinders_anybody(ui: Any, look: Look, runs: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = look(ui, color_scheme=scheme, bypass_csp=True).page
    for path in _paths(page, ui, runs):
        page.goto(ui.origin + path)
        page.locator("h1").wait_for()
        page.wait_for_timeout(500)  # the answers, and their charts
        found = axe.run(page).response["violations"]
        serious = [
            (each["id"], [node["html"] for node in each["nodes"]][:2])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert not serious, (path, serious)


def test_a_narrow_window_does_not_scroll_sideways(ui: Any, look: Look, runs: Path) -> None:
    page = look(ui).page
    for path in _paths(page, ui, runs):
        page.set_viewport_size({"width": 400, "height": 800})
        page.goto(ui.origin + path)
        page.locator("h1").wait_for()
        page.wait_for_timeout(500)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 400, (path, width)
        page.set_viewport_size({"width": 1400, "height": 900})


def test_ctrl_c_ends_it_with_pages_open(serve: Serve, look: Look, runs: Path) -> None:
    served = serve(runs)
    page = look(served, f"/runs/{RUN}").page
    page.locator("figure svg").first.wait_for()
    assert served.stop() in (0, 130)
