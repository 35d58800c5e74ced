"""Protocols of engines and learners, with their capabilities.

`engine` has the protocols of engines and tokenizers, `learner` those of learners, with losses,
optimizers and adapters as settings. `decoding` turns streams of ids into text.
"""
