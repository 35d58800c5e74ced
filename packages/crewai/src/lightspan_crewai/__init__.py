"""lightspan for CrewAI: every model call under the name of its agent.

import lightspan_crewai

lightspan_crewai.instrument()             # or LightspanListener(), as CrewAI's own listeners
lightspan_crewai.agents(crew)             # what `optimize=` may name
"""

from lightspan.capture.adapter import require_framework, too_new
from lightspan_crewai._versions import FLOOR, FRAMEWORK

_found = require_framework(FRAMEWORK, FLOOR)
try:
    from lightspan_crewai._hook import LightspanListener, instrument, uninstrument
    from lightspan_crewai._static import agents
except ImportError as error:
    raise too_new("lightspan-crewai", FRAMEWORK, _found, error) from error

__all__ = ["LightspanListener", "agents", "instrument", "uninstrument"]
