"""Rewards, under their older path in Agent Lightning."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from lightspan.errors import UnsupportedError
from lightspan_agl._unsupported import REWARD_DECORATOR, refuse_names as _refuse_names
from lightspan_agl.emitter import emit_reward, find_final_reward

__all__ = ["emit_reward", "find_final_reward"]
__getattr__ = _refuse_names(__name__, reward=REWARD_DECORATOR)


class _Module(ModuleType):
    """This module; Agent Lightning has a decorator of the same name."""

    __module__ = ModuleType.__module__  # else the module would pass for a name of the package

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"@lightspan_agl.reward: {REWARD_DECORATOR}")


sys.modules[__name__].__class__ = _Module
