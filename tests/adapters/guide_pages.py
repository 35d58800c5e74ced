"""Import the programs on the adapters' pages, `docs/guides/*.md`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pages import blocks  # type: ignore[import-not-found]


def import_page(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> dict[str, ModuleType]:
    """Import every Python file on a page; return its name → its module.

    `train.py` is imported too, which starts no training.

    Args:
        page: name of the page in `docs/guides`, without `.md`.
        folder: an empty folder for the files.
        monkeypatch: undoes the changes of this process after the test.
        url: the endpoint of the app's clients.
    """
    files = {name: text for _, name, text in blocks(f"guides/{page}.md") if name.endswith(".py")}
    assert "train.py" in files
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.syspath_prepend(folder)
    names = [name.removesuffix(".py") for name in files]
    for name in names:  # other pages have modules of the same names
        monkeypatch.delitem(sys.modules, name, raising=False)
        (folder / f"{name}.py").write_text(files[f"{name}.py"])
    modules = {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]
    return modules


def shown(page: str) -> list[str]:
    """Return the outputs on a page: the blocks of kind `text`."""
    return [text.rstrip() for kind, _, text in blocks(f"guides/{page}.md") if kind == "text"]
