"""Algorithms: APO, VERL, and functions under `algo`."""

from __future__ import annotations

from lightspan_agl._unsupported import refuse_names as _refuse_names
from lightspan_agl.algorithm.apo import APO
from lightspan_agl.algorithm.decorator import algo
from lightspan_agl.algorithm.verl import VERL

__all__ = ["APO", "VERL", "algo"]
__getattr__ = _refuse_names(__name__)
