"""lightspan for CrewAI: every model call under the name of its agent.

import lightspan_crewai

lightspan_crewai.instrument()             # or LightspanListener(), made before the crew starts
lightspan_crewai.agents(crew)             # the names for `optimize=`
"""

from lightspan.instrumentation import require_framework
from lightspan_crewai._versions import FLOOR, FRAMEWORK

with require_framework("lightspan-crewai", FRAMEWORK, FLOOR):
    from lightspan_crewai._hook import LightspanListener, instrument, uninstrument
    from lightspan_crewai._static import agents

__all__ = ["LightspanListener", "agents", "instrument", "uninstrument"]
