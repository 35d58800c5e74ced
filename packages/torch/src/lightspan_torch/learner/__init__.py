"""The embedded learner: rows of exact token ids in, a new version of the policy's weights out.

`config` is `lightspan.Torch`, `torch` the learner. `validation` checks rows, `policy_model` holds
weights, LoRA and optimizer, `prefix_tree` merges common prefixes, `tree_forward` runs them through
the model (`_tree_attention`), `microbatch` sizes the passes, `token_losses` computes
log-probabilities and gradients, `critic` estimates values of calls, `masks` applies grammars,
`call_index` maps tokens to calls, `losses` has the formulas, `objective` combines them per token,
`metrics` reduces metrics, `memory` estimates memory, `checkpoint` reads and writes checkpoints.
"""
