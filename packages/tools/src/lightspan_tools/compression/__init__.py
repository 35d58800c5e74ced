"""Compress an app's large endpoint into a small model (`lightspan compress`).

`recorded` reads what a store of production says of the calls: tokens, scores and agents. `run`
fine-tunes the small model and runs the app on held-out tasks. `measurement` reads the costs of
these runs, and `report` describes everything.
"""
