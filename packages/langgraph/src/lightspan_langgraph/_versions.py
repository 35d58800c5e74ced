"""The oldest versions of LangGraph and LangChain that the adapter supports."""

from __future__ import annotations

from typing import Final

FRAMEWORK: Final = "langgraph"
FLOOR: Final = "1.1.5"
"""Oldest supported version, because fresh installs of 1.0.0 to 1.1.4 cannot import
`langgraph.prebuilt`.
"""

LANGCHAIN: Final = "langchain-core"
LANGCHAIN_FLOOR: Final = "1.2.10"
