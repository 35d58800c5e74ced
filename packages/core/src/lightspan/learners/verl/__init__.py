"""A learner over verl's `TrainingWorker`, in verl's own environment and processes.

In the trainer's process: `description` is how a user asks for it, `environment` looks whether an
interpreter has what is needed, `workers` starts the processes and talks with them, `learner` is the
`Learner`. In verl's processes, of which the trainer's packages are no part: `rank` is what each
runs, `training` one policy there, `shards` its checkpoints. `internals` alone knows names of verl's
that verl does not promise; `orders` is what both sides
say, and `frames` how it passes.
"""
