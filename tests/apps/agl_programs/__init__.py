"""The programs of `agl_comparison`, by what they show: `records`, `traces`, `adapters`, `agents`,
`stores`, `training`. What each is, `program` says."""

from __future__ import annotations

from agl_programs import adapters, agents, records, stores, traces, training
from agl_programs.program import PROGRAMS, SHOWN

__all__ = ["PROGRAMS", "SHOWN", "adapters", "agents", "records", "stores", "traces", "training"]
