"""How many attributes of other people's classes an app's process finds replaced."""

from __future__ import annotations

import subprocess
import sys

MAX_PATCHED = 12

COUNT = """
import gc
import aiohttp, anthropic, asyncio, httpx, multiprocessing.pool, openai, queue, requests
from lightspan.capture import context_propagation
from lightspan.capture.entry import open_scope
from lightspan.capture.context import AttemptContext

# what Python and pydantic build when it is first asked for
BUILT = ("__pydantic_", "__signature__", "__module__", "__abstractmethods__", "_abc_")

def attributes():
    kinds = [kind for kind in gc.get_objects() if isinstance(kind, type)]
    return {kind: dict(vars(kind)) for kind in kinds if "lightspan" not in str(kind.__module__)}

before = attributes()
context_propagation.carry()
with open_scope(AttemptContext(rollout_id="r", attempt_id="a")):
    for kind, old in before.items():
        for name in vars(kind).keys() | old.keys():
            if vars(kind).get(name) is not old.get(name) and not name.startswith(BUILT):
                print(f"{kind.__module__}.{kind.__qualname__}.{name}")
"""


def test_patched_attributes_of_other_peoples_classes() -> None:
    """In a process that has imported the SDKs and HTTP clients, inside the scope of a rollout."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, timeout=120
    )
    patched = done.stdout.split()
    assert "openai.OpenAI.request" in patched
    assert len(patched) <= MAX_PATCHED, patched
    assert not any(name.startswith(("httpx", "requests", "aiohttp", "queue")) for name in patched)
