"""GEPA: learns prompts by reflection (arXiv 2507.19457), with the library of the same name.

The library decides which candidate is tried next; `search` runs it in a thread and answers what it
asks: evaluations by rollouts (`feedback` is what they showed), other texts by a `reflection` model.
Whatever was answered is in the `journal`, so that a run that was killed asks nothing twice.
`survey` finds the texts of agents in the calls of an app as it is. `algorithm` is what a trainer is
given.
"""

from lightspan.algorithms.gepa.algorithm import GEPA

__all__ = ["GEPA"]
