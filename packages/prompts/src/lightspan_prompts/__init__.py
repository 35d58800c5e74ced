"""Algorithms that learn prompts instead of weights, and a judge for rewards.

`gepa` and `apo` choose the next prompts to try; `search` has their common parts; `alternate` trains
weights and prompts in turns. `judge` scores attempts by a language model; its prompts are in
`judge_prompts`, and show an attempt as a `transcript`. `endpoint_client` calls the language model,
and `pricing` computes the cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_prompts.alternate import Alternate as Alternate
    from lightspan_prompts.apo.algorithm import APO as APO
    from lightspan_prompts.gepa.algorithm import GEPA as GEPA
    from lightspan_prompts.judge import Judge as Judge

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "APO": "lightspan_prompts.apo.algorithm",
        "Alternate": "lightspan_prompts.alternate",
        "GEPA": "lightspan_prompts.gepa.algorithm",
        "Judge": "lightspan_prompts.judge",
    },
)
