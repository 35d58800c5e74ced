"""The oldest version of AutoGen that the adapter supports."""

from __future__ import annotations

from typing import Final

FRAMEWORK: Final = "autogen-agentchat"
FLOOR: Final = "0.7.1"
"""Oldest supported version, because teams of older versions have no names."""
