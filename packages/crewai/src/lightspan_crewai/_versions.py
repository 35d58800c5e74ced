"""Which version of its framework this adapter needs."""

from __future__ import annotations

from typing import Final

FRAMEWORK: Final = "crewai"
FLOOR: Final = "1.11.0"
"""The first version whose threads keep the context: asynchronous tasks, tools, time limits."""
