"""A learner over verl's `TrainingWorker`, in verl's own environment and processes.

In the trainer's process: `description` is how a user asks for it, `environment` looks whether an
interpreter has what is needed, `learner` is the `Learner`. It gives orders to a `team` of ranks:
`workers` starts them as processes, `ray_workers` has them in a Ray cluster. In verl's processes, of
which the trainer's packages are no part: `rank` is what each runs, `training` one policy there,
`shards` its checkpoints; `steward` drives those in Ray, as verl's `ray_group`. `internals` and that
alone know names of verl's that verl does not promise; `orders` is what both sides say, and `frames`
how it passes.
"""
