"""The framework version that this adapter needs."""

from __future__ import annotations

from typing import Final

FRAMEWORK: Final = "crewai"
FLOOR: Final = "1.11.0"
"""First version whose threads copy the context: asynchronous tasks, tools, time limits."""
