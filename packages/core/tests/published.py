"""Chat templates that model families publish, read from the installed `trl`.

They are not copied here because of their licences; trl contains the files of many families.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def published_template(name: str) -> str:
    """Return a published template (`qwen2_5`, `llama3_2`, `phi3`, …) without importing trl."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.fail("published chat templates are read from trl: pip install --no-deps trl")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
