"""Algorithms: APO and VERL."""

from __future__ import annotations

from lightspan_agl.algorithm.apo import APO
from lightspan_agl.algorithm.verl import VERL

__all__ = ["APO", "VERL"]
