"""What the algorithms share that learn prompts: `gepa` and `apo` decide which text is tried next.

`evaluator` runs rollouts and asks a `reflection` model, within the budget; `feedback` describes
what rollouts showed; `search_log` is the resumable log, so that a killed run asks nothing twice.
`prompt_discovery` finds the prompts of agents in recorded calls, `candidates` holds texts and
scores, `selected_prompts` what apps are given, `search` is the base of both algorithms,
`validation` checks options.
"""
