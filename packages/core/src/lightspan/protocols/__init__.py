"""The protocols of engines and learners: what a backend is, and what it says of itself.

`engine` has the protocols of engines and tokenizers, `learner` those of learners with their losses,
optimizers and adapters as settings. `decoding` turns ids into text as they arrive.
"""
