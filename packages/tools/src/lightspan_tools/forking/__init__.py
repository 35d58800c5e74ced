"""`lightspan fork`: continue a recorded rollout from one of its calls, or find where it was lost.

`loss_search` is the bisection, `weights` chooses the weights of a run that answer, `session` runs
the continuations, `report` is what the command prints, `run` puts these together.
"""
