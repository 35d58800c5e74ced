"""The roles of a served store's keys."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The role of a key, which determines the operations that the key permits."""

    ADMIN = "admin"
    TRAINER = "trainer"
    RUNNER = "runner"
    READER = "reader"
    """Only reads, and sees no call token."""
    TRACER = "tracer"
