"""The roles of a served store's keys."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The permissions of a key."""

    ADMIN = "admin"
    TRAINER = "trainer"
    RUNNER = "runner"
    TRACER = "tracer"
