"""The torch learner on several devices of one machine, data parallel.

`learner` is what the trainer holds: rank 0, which hands each rank its share of the rows (`shares`)
as `messages`, and takes what they answer. `worker` is what every other rank runs. `group` connects
them, and in `steps` they agree on an update: its tally and its gradient are added up. `processes`
starts the other ranks and says how one ended; `torchrun` finds those that somebody else started.
"""
