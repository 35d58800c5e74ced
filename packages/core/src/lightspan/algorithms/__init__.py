"""Algorithms decide what to run and what to learn from it.

`protocol` says what an algorithm is and what World a trainer offers it. `lightning_rl` learns from
rewards (`overlap`: while rollouts go on), `gepa` and `apo` learn prompts (what they share is in
`prompts`), `alternate` does both in turns, `sft` learns from chats (`unfinished` is what its Ctrl-C
leaves). `replays` rejects what does not follow its grammar; `epochs` orders tasks; `traces` and
`chats` read what production recorded, `jsonl` files; `rates` chooses a learning rate where none is
given, `expectations` remembers whether a critic may be built on; `metrics` words what an iteration
did.
"""

from lightspan.algorithms.protocol import Algorithm, Metrics, Policy, PolicySpec, World, local_model

__all__ = ["Algorithm", "Metrics", "Policy", "PolicySpec", "World", "local_model"]
