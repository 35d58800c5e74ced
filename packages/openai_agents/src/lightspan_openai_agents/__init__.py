"""lightspan for the OpenAI Agents SDK: every model call under the name of its agent.

import lightspan_openai_agents

lightspan_openai_agents.instrument()      # or add_trace_processor(LightspanProcessor())
lightspan_openai_agents.agents(triage)    # what `optimize=` may name
"""

from lightspan.capture.adapter import require_framework, too_new
from lightspan_openai_agents._versions import FLOOR, FRAMEWORK

_found = require_framework(FRAMEWORK, FLOOR)
try:
    from lightspan_openai_agents._hook import LightspanProcessor, instrument, uninstrument
    from lightspan_openai_agents._static import agents
except ImportError as error:
    raise too_new("lightspan-openai-agents", FRAMEWORK, _found, error) from error

__all__ = ["LightspanProcessor", "agents", "instrument", "uninstrument"]
