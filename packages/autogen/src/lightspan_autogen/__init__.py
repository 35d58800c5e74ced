"""lightspan for AutoGen: every model call under the name of its agent.

import lightspan_autogen

lightspan_autogen.instrument()            # or runtime=LightspanRuntime(), for some teams only
lightspan_autogen.agents(team)            # what `optimize=` may name
"""

from lightspan.capture.adapter import require_framework, too_new
from lightspan_autogen._versions import FLOOR, FRAMEWORK

_found = require_framework(FRAMEWORK, FLOOR)
try:
    from lightspan_autogen._hook import LightspanRuntime, instrument, uninstrument
    from lightspan_autogen._static import agents
except ImportError as error:
    raise too_new("lightspan-autogen", FRAMEWORK, _found, error) from error

__all__ = ["LightspanRuntime", "agents", "instrument", "uninstrument"]
