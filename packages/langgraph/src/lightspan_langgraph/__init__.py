"""lightspan for LangGraph and LangChain: every model call under the name of its agent.

import lightspan_langgraph

lightspan_langgraph.instrument()          # or {"callbacks": [LightspanCallback()]} in one call
lightspan_langgraph.agents(graph)         # what `optimize=` may name
"""

from lightspan.capture.adapter import require_framework, too_new
from lightspan_langgraph._versions import FLOOR, FRAMEWORK

_found = require_framework(FRAMEWORK, FLOOR)
try:
    from lightspan_langgraph._hook import LightspanCallback, instrument, uninstrument
    from lightspan_langgraph._static import agents
except ImportError as error:
    raise too_new("lightspan-langgraph", FRAMEWORK, _found, error) from error

__all__ = ["LightspanCallback", "agents", "instrument", "uninstrument"]
