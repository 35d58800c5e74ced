"""`AgentOpsTracer` under its path in Agent Lightning."""

from __future__ import annotations

from lightspan_agl.tracer import AgentOpsTracer

__all__ = ["AgentOpsTracer"]
