"""GEPA: learn prompts by reflection (arXiv 2507.19457), with the library `gepa`.

The library decides which candidate is tried next; `search` runs it in a thread and serves its
requests by `lightspan_prompts.search.evaluator`, with the prompts of `reflection_prompts`.
`algorithm` is the trainer's interface.
"""

from lightspan_prompts.gepa.algorithm import GEPA

__all__ = ["GEPA"]
