"""lightspan for the OpenAI Agents SDK: it finds out which agent makes each model call.

import lightspan_openai_agents

lightspan_openai_agents.instrument()      # or add_trace_processor(LightspanProcessor())
lightspan_openai_agents.agents(triage)    # the names for `optimize=`
"""

from lightspan.instrumentation import require_framework
from lightspan_openai_agents._versions import FLOOR, FRAMEWORK

with require_framework("lightspan-openai-agents", FRAMEWORK, FLOOR):
    from lightspan_openai_agents._hook import LightspanProcessor, instrument, uninstrument
    from lightspan_openai_agents._static import agents

__all__ = ["LightspanProcessor", "agents", "instrument", "uninstrument"]
