"""What a key of a served store opens."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Who its owner is."""

    ADMIN = "admin"
    TRAINER = "trainer"
    RUNNER = "runner"
    TRACER = "tracer"

    @property
    def may(self) -> str:
        """Who that is, and what they may do, in words."""
        return _MAY[self]


_MAY = {
    Role.ADMIN: "who may do everything",
    Role.TRAINER: "trainers, which ask for rollouts and read what became of them",
    Role.RUNNER: "runners, which claim, record and report",
    Role.TRACER: "apps and collectors, which send OpenTelemetry's traces and read nothing",
}
