"""lightspan for LangGraph and LangChain: it finds out which agent makes each model call.

import lightspan_langgraph

lightspan_langgraph.instrument()          # or {"callbacks": [LightspanCallback()]} in one call
lightspan_langgraph.agents(graph)         # the names for `optimize=`
"""

from lightspan.instrumentation import require_framework
from lightspan_langgraph._versions import FLOOR, FRAMEWORK, LANGCHAIN, LANGCHAIN_FLOOR

with require_framework("lightspan-langgraph", FRAMEWORK, FLOOR):
    with require_framework("lightspan-langgraph", LANGCHAIN, LANGCHAIN_FLOOR):
        pass  # its version is checked before the import, which may fail with an old one
    from lightspan_langgraph._hook import LightspanCallback, instrument, uninstrument
    from lightspan_langgraph._static import agents

__all__ = ["LightspanCallback", "agents", "instrument", "uninstrument"]
