"""The framework version that this adapter needs."""

from __future__ import annotations

from typing import Final

FRAMEWORK: Final = "openai-agents"
FLOOR: Final = "0.20.0"
"""The newest that can be installed beside the newest CrewAI, which needs `openai<3`."""
