"""Make the pictures of the documentation from the committed run: `nox -s ui -- --pictures`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PICTURES = {
    "ui-run": "/runs/sql",
    "ui-prompts": "/runs/prompts/prompts?candidate=1",
}


@pytest.mark.parametrize("name", [*PICTURES, "ui-group", "ui-call"])
def test_a_picture_shows_the_page(
    serve: Callable[..., Any], runs: Path, look: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """Take a picture into docs/images if LIGHTSPAN_PICTURES is set, else elsewhere."""
    served = serve(runs)
    page = look(served, PICTURES.get(name, "/runs/sql/groups?mode=train&sort=spread")).page
    if name not in PICTURES:
        page.locator("tbody a").first.click()
        page.locator(".answer a").first.wait_for()
    if name == "ui-call":
        page.locator(".answer a", has_text="advantage +").first.click()
        page.locator(".tokens span").first.wait_for()
    page.locator("figure svg, tbody tr, .tokens span").first.wait_for()
    page.wait_for_timeout(500)
    folder = IMAGES if os.environ.get("LIGHTSPAN_PICTURES") else tmp_path
    page.screenshot(path=folder / f"{name}.png", animations="disabled")
    assert (folder / f"{name}.png").stat().st_size > 20_000
    assert (IMAGES / f"{name}.png").exists()
