"""Test import hooks: what runs at the import, what remains, and hooks of other libraries."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightspan.capture.import_hooks import ImportHook

NAME = "imported_once_awaited"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the awaited module; check afterwards that no import hook remains."""
    (tmp_path / f"{NAME}.py").write_text("VALUE = 1\nLOADER = __loader__\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a module is changed within a second
    before = list(sys.meta_path)
    yield tmp_path
    assert sys.meta_path == before
    sys.modules.pop(NAME, None)


@pytest.fixture
def seen() -> list[Any]:
    return []


def awaited(seen: list[Any]) -> ImportHook:
    """Return a hook that appends the module's value to `seen` after the import."""
    return ImportHook(NAME, lambda: seen.append(importlib.import_module(NAME).VALUE))


def test_it_is_done_once_the_module_is_executed(seen: list[Any]) -> None:
    awaited(seen)
    import json

    importlib.reload(json)
    assert seen == []
    module = importlib.import_module(NAME)
    assert seen == [1]
    loaders = {module.LOADER, module.__loader__, module.__spec__ and module.__spec__.loader}
    assert [type(loader) for loader in loaders] == [SourceFileLoader]
    importlib.import_module(NAME)
    importlib.reload(module)
    assert seen == [1]


def test_an_import_that_fails_can_be_tried_again(seen: list[Any], folder: Path) -> None:
    awaited(seen)
    path = folder / f"{NAME}.py"
    path.write_text("raise RuntimeError('not yet')\n")
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module(NAME)
    assert seen == []
    path.write_text("VALUE = 2\n")
    importlib.import_module(NAME)
    assert seen == [2]


def test_nothing_is_done_after_stop(seen: list[Any]) -> None:
    awaited(seen).stop()
    importlib.import_module(NAME)
    assert seen == []


class Theirs(MetaPathFinder):
    """An import hook like wrapt's: it asks all finders, and ignores itself the second time."""

    def __init__(self, seen: list[Any]) -> None:
        self.asking = False
        self.seen = seen

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != NAME or self.asking:
            return None
        self.asking = True
        try:
            self.seen.append("theirs")
            return importlib.util.find_spec(fullname)
        finally:
            self.asking = False


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_others_wait_for_it_too(
    seen: list[Any], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    theirs = Theirs(seen)
    if first == "theirs":
        awaited(seen)
    sys.meta_path.insert(0, theirs)
    if first == "ours":
        awaited(seen)
    importlib.import_module(NAME)
    assert sorted(map(str, seen)) == ["1", "theirs"]
    sys.meta_path.remove(theirs)


# --- the SDKs -------------------------------------------------------------------------------
def run(code: str) -> list[str]:
    """Run `code` in a new process, and return the lines that it prints."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def wrapped(name: str) -> str:
    """Return code that prints whether the two clients of the SDK `name` are wrapped."""
    module = f"__import__({name!r})"
    kinds = {"openai": ("OpenAI", "AsyncOpenAI"), "anthropic": ("Anthropic", "AsyncAnthropic")}
    requests = f"getattr({module}, kind).request for kind in {kinds[name]}"
    module_name = "lightspan.capture.sdk_instrumentation"
    return f"print(*(one.__module__ == {module_name!r} for one in ({requests})))\n"


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_an_sdk_is_wrapped_when_the_app_imports_it(name: str) -> None:
    pytest.importorskip(name)
    code = (
        "import sys\n"
        "from lightspan.capture import sdk_instrumentation\n"
        "sdk_instrumentation.install()\n"
        "loaded = [name in sys.modules for name in ('openai', 'anthropic')]\n"
        "print(sdk_instrumentation.installed(), *loaded)\n"
        f"import {name}\n{wrapped(name)}"
        f"sdk_instrumentation.uninstall()\nprint(sdk_instrumentation.installed())\n{wrapped(name)}"
        f"sdk_instrumentation.install()\nsdk_instrumentation.install()\n{wrapped(name)}"
    )
    expected = ["True False False", "True True", "False", "False False", "True True"]
    assert run(code) == expected


def test_an_app_can_import_what_cannot_be_wrapped() -> None:
    """Check that an SDK that cannot be wrapped is imported anyway, with a capture error."""
    code = (
        "from lightspan.capture import sdks, sdk_instrumentation\n"
        "from lightspan.capture.entry import open_scope\n"
        "from lightspan.capture.context import AttemptContext\n"
        "sdks.Sdk.wrapped_classes = None\n"
        "with open_scope(AttemptContext(rollout_id='r', attempt_id='a')) as scope:\n"
        "    import openai\n"
        "    print(*scope.recorder.capture_errors())\n"
        "with open_scope(AttemptContext(rollout_id='r', attempt_id='b')) as scope:\n"
        "    print(*scope.recorder.capture_errors())\n"
    )
    damage = "a client SDK could not be wrapped: TypeError(\"'NoneType' object is not callable\")"
    assert run(code) == [damage, damage]
