"""Learn prompts instead of weights.

`gepa` and `apo` decide which prompt is tried next, `search` has what they share, `alternate` trains
weights and prompts in turns. `judge` scores attempts by a language model, with the prompts of
`judge_prompts`; `endpoint_client` calls such a model.
"""
