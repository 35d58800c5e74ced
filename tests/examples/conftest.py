"""An example's tests are collected where it is installed: some have an environment of their own."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [
    f"test_{name}_*.py" for name in ("math", "rag") if find_spec(f"{name}_example") is None
]
