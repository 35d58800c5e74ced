"""APO: learn prompts by textual gradients and beam search (ProTeGi, arXiv 2305.03495).

`search` keeps a beam of candidates. Each round, a language model criticises a prompt given rollouts
of a few tasks, and rewrites it accordingly (`reflection_prompts`); the best candidates on a batch
of the selection split form the next beam. `algorithm` is the trainer's interface.
"""

from lightspan_prompts.apo.algorithm import APO

__all__ = ["APO"]
