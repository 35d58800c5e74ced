"""APO: learn prompts by textual gradients and beam search (ProTeGi, arXiv 2305.03495).

A candidate is a set of prompts, and the beam is the set of the best candidates so far. In each
round, a language model criticises a prompt of a candidate, given runs of the app on a few tasks,
and rewrites it (`reflection_prompts`). The candidates with the best results on some tasks of the
selection split form the next beam. `search` does this; `algorithm` has the options and connects the
search to the trainer.
"""

from lightspan_prompts.apo.algorithm import APO

__all__ = ["APO"]
