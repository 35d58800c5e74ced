"""Detection of graph nodes that are part of a prebuilt agent: they run a function of its maker's.

Tutorials name the nodes of custom graphs `agent` and `tools` too, so the name alone is not enough.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from langgraph.prebuilt import ToolNode

from lightspan_langgraph._identity import is_prebuilt_node

_AMBIGUOUS_NAMES: Final = frozenset({"agent", "model", "tools", "generate_structured_response"})
"""Names of prebuilt nodes that never run the user's function; nodes with the other names may."""
_MAKERS: Final = ("langgraph.prebuilt", "langchain.agents")


def is_prebuilt(name: str, bound: Any) -> bool:
    """Return whether a node of this name, which runs `bound`, is part of a prebuilt agent."""
    if name not in _AMBIGUOUS_NAMES:
        return is_prebuilt_node(name)
    function = getattr(bound, "func", None) or getattr(bound, "afunc", None)
    return isinstance(bound, ToolNode) or str(getattr(function, "__module__", "")).startswith(
        _MAKERS
    )


def is_running_prebuilt(name: str) -> bool | None:
    """Return whether the node that begins to run is part of a prebuilt agent; None if its name
    decides.

    LangGraph passes only the node's name to a callback. The object that the node runs is held by a
    caller of the callback; if that is not on the stack, the name decides.
    """
    if name not in _AMBIGUOUS_NAMES:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if type(owner).__name__ == "RunnableSeq":
            return is_prebuilt(name, owner.steps[0])
        frame = frame.f_back
    return None
