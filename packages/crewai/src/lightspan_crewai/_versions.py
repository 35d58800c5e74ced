"""The oldest version of CrewAI that the adapter supports."""

from __future__ import annotations

from typing import Final

FRAMEWORK: Final = "crewai"
FLOOR: Final = "1.11.0"
"""Oldest supported version.

Older versions do not copy the context to the threads of asynchronous tasks, tools and time limits.
"""
