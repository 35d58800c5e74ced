"""Training of an app's agents: everything that a `Trainer` runs.

- `settings` validates a trainer's arguments.
- `session` opens the parts of a run and is the `TrainerContext` of its algorithm.
- `loop` runs the steps.
- `backends` builds engine and learner.
- `data` loads tasks; `collector` enqueues rollouts and reads their episodes.
- `in_flight` tracks groups of rollouts that were submitted and not trained yet.
- `rewards` scores episodes in place of the app.
- `cpu_meter` and `call_budget` count costs.
- `folder` reads and writes the files of a run; `manifest` describes its data and result.
- `jsonl_log` appends lines that survive a kill.
- `checkpoints` and `resume` restart a run; `model_selection` chooses the best step.
- `results` and `statistics` describe evaluations.
- `sinks` copies metrics to experiment trackers; `listeners` calls plugins after each step.
"""
