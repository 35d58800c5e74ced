"""lightspan for AutoGen: records every model call together with its agent's name.

import lightspan_autogen

lightspan_autogen.instrument()            # or runtime=LightspanRuntime(), for some teams only
lightspan_autogen.agents(team)            # the names for `optimize=`
"""

from lightspan.instrumentation import require_framework
from lightspan_autogen._versions import FLOOR, FRAMEWORK

with require_framework("lightspan-autogen", FRAMEWORK, FLOOR):
    from lightspan_autogen._hook import LightspanRuntime, instrument, uninstrument
    from lightspan_autogen._static import agents

__all__ = ["LightspanRuntime", "agents", "instrument", "uninstrument"]
