"""Embedded learner: trains policies on rows of token ids, in this process.

Start with `torch`, the learner, and `config`, its settings (`lightspan.Torch`).

| module | purpose |
|---|---|
| `validation` | checks rows |
| `policy_model` | weights, LoRA and optimizer of a policy |
| `prefix_tree` | merges common prefixes of rows |
| `tree_forward`, `_tree_attention` | run merged rows through the model |
| `microbatch` | limits the tokens of a forward pass |
| `token_losses` | computes log-probabilities and gradients |
| `losses`, `objective` | formulas of losses; loss of each token |
| `critic` | estimates the values of calls |
| `masks` | applies grammars |
| `call_index` | maps tokens to calls |
| `metrics`, `memory` | combine metrics; estimate memory |
| `checkpoint` | reads and writes checkpoints |
"""
