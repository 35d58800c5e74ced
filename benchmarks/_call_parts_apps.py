"""The apps of `call_parts.py`; runner processes import them by name.

While the file that `call_parts.py` touches exists, the process is sampled; then its parts are
written.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any, Final

from _cpu_parts import CpuParts

TOKENS: Final = 8
QUESTION: Final = " ".join(f"w{n}{n}" for n in range(13))
RULES: Final = {
    "LangChain": ("/langchain_core/", "/langchain_openai/", "/langsmith/", "/tenacity/"),
    "HTTP client (httpx, httpcore)": ("/httpx", "/httpcore", "/h11/", "/anyio/"),
    "OpenAI's SDK (pydantic)": ("/openai/", "/pydantic/"),
    "capture": ("lightspan/capture", "lightspan/instrumentation"),
    "store": ("lightspan/stores", "/msgspec/"),
    "runner": ("lightspan/runners", "lightspan/schema", "lightspan/progress"),
}
"""Parts of the process of the app."""


def asks_openai(task: Any, llm: Any) -> float:
    """Ask once through the OpenAI client."""
    answer = _client().chat.completions.create(
        model="m", messages=[{"role": "user", "content": QUESTION}], max_tokens=TOKENS
    )
    return float(bool(answer.choices))


def asks_langchain(task: Any, llm: Any) -> float:
    """Ask once through LangChain's client."""
    return float(bool(_chat_model().invoke(QUESTION)))


@cache
def _client() -> Any:
    import openai

    return openai.OpenAI(base_url="http://localhost/v1", api_key="none")


@cache
def _chat_model() -> Any:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"base_url": "http://localhost/v1", "max_tokens": TOKENS}
    return ChatOpenAI(model="m", api_key="none", **options)  # type: ignore[arg-type]


def _watch() -> None:
    path = Path(tempfile.gettempdir()) / f"call-parts-{os.getpid()}.json"
    begin = path.with_suffix(".begin")
    while not begin.exists():
        time.sleep(0.02)
    with CpuParts(RULES) as parts:
        while begin.exists():
            time.sleep(0.02)
    lines = [(part, function, ns) for (part, function), ns in parts.lines.items()]
    near = path.with_suffix(".new")
    near.write_text(json.dumps({"ns": parts.ns, "lines": lines}))
    near.replace(path)


threading.Thread(target=_watch, daemon=True).start()
