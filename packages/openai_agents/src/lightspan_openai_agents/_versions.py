"""The framework version that this adapter needs."""

from __future__ import annotations

from typing import Final

FRAMEWORK: Final = "openai-agents"
FLOOR: Final = "0.20.0"
"""Newest version that can be installed with the newest CrewAI, which needs `openai<3`."""
