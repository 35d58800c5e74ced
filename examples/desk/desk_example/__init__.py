"""A help desk, and the search for a better prompt of its one agent.

`app` is the program itself and knows nothing of lightspan, `command` its command line. `training`
runs it with a reward; `candidates` are the prompts that the scripted `reflection` proposes;
`serving` has a model answer; `options` is the command line of `train.py`. `comparison` is what
`compare.py` makes of its measurements, and `replay` a search that is answered from them.
"""
