"""APO: learns prompts by textual gradients and beam search (ProTeGi, arXiv 2305.03495).

`search` keeps a beam of candidates: each round, a language model says what the rollouts of a few
tasks show to be wrong with a prompt, and rewrites it by that (`questions`); the best of the old
and the new ones on a batch of the selection split go on. `algorithm` is what a trainer is given.
"""

from lightspan_prompts.apo.algorithm import APO

__all__ = ["APO"]
