"""A help desk, and the search for a better prompt of its one agent.

- `app` is the program, which does not import lightspan; `command` is its command line.
- `training` runs the app with a reward; `options` is the command line of `train.py`.
- `candidates` are the prompts that the scripted `reflection` proposes.
- `serving` starts a model that answers the app.
- `comparison` computes the tables of `compare.py`; `replay` runs a search from recorded answers.
"""
