"""Parts that `apo` and `gepa` share: evaluation, reflection, logs and prompt discovery.

`search` is the base of both algorithms. `evaluator` runs rollouts and sends requests to a
`reflection` model within the budget; `feedback` describes rollouts; `search_log` is the log from
which a killed run resumes. `prompt_discovery` finds the prompts of agents in recorded calls,
`template_inference` and `template_variables` infer their templates. `candidates` holds prompts with
their scores, `selected_prompts` the prompts in use; `validation` checks options.
"""
