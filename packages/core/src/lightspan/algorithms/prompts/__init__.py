"""What algorithms share that learn prompts: `gepa` and `apo` decide which text is tried next.

`trials` does what they ask for: evaluations by rollouts (`feedback` is what those showed), and
questions to a `reflection` model. Whatever was answered is in the `journal`, so that a run that was
killed asks nothing twice. `survey` finds the texts of agents in the calls of an app as it is.
`candidates` is what a search compares by and what it found, `chosen` what apps are handed of that,
`search` the algorithm around it, and `options` checks what it was given.
"""
