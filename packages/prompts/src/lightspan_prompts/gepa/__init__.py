"""GEPA: learns prompts by reflection (arXiv 2507.19457), with the library of the same name.

The library decides which candidate is tried next; `search` runs it in a thread and answers what it
asks by the trials of `lightspan_prompts.search`, with the `questions` that reflections are
asked. `algorithm` is what a trainer is given.
"""

from lightspan_prompts.gepa.algorithm import GEPA

__all__ = ["GEPA"]
