"""The framework version that this adapter needs."""

from __future__ import annotations

from typing import Final

FRAMEWORK: Final = "autogen-agentchat"
FLOOR: Final = "0.7.1"
"""The first version whose teams have names."""
