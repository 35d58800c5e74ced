"""The oldest version of the Agents SDK that the adapter supports."""

from __future__ import annotations

from typing import Final

FRAMEWORK: Final = "openai-agents"
FLOOR: Final = "0.20.0"
"""Oldest supported version: the newest one that can be installed with CrewAI (`openai<3`)."""
