"""Which graph nodes are part of a prebuilt agent: those that run a function of the maker's.

`agent` and `tools` are also what tutorials call the nodes of a graph of one's own, so that the name
alone says nothing.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from langgraph.prebuilt import ToolNode

from lightspan_langgraph._identity import is_prebuilt_node

_SHARED: Final = frozenset({"agent", "model", "tools", "generate_structured_response"})
"""Names of prebuilt nodes whose function is never the user's; of the others it may be."""
_MAKERS: Final = ("langgraph.prebuilt", "langchain.agents")


def is_prebuilt(name: str, bound: Any) -> bool:
    """Whether a node of this name, which runs `bound`, is part of a prebuilt agent."""
    if name not in _SHARED:
        return is_prebuilt_node(name)
    function = getattr(bound, "func", None) or getattr(bound, "afunc", None)
    return isinstance(bound, ToolNode) or str(getattr(function, "__module__", "")).startswith(
        _MAKERS
    )


def is_running_prebuilt(name: str) -> bool | None:
    """The same of the node of this name that begins to run; None where its name says it.

    LangGraph tells a callback the node's name alone. What the node runs is held by whoever tells
    it, a few calls further out; where that is not found, the name has to do.
    """
    if name not in _SHARED:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        teller: Any = frame.f_locals.get("self")
        if type(teller).__name__ == "RunnableSeq":
            return is_prebuilt(name, teller.steps[0])
        frame = frame.f_back
    return None
