"""A coding agent that repairs small Python packages, and the code that trains it on a laptop.

- `app` runs mini-swe-agent, unedited, in a sandbox. It does not import lightspan.
- `sandbox` is bubblewrap, with pytest as the verifier.
- `bugs` and `packages` generate the tasks; `sessions` are recorded good sessions.
- `training` runs the app for `train.py`.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

# mini-swe-agent reads these when it is imported, and LiteLLM with it
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # prices are not fetched
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")  # the client retries already


def __getattr__(name: str) -> Any:
    """Import `answer`, the app with its reward, at its first use; the app does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("terminal_example.training").answer
