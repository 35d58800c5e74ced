"""What a `Trainer` runs: an app, an algorithm and tasks go in, a better model and a run's folder
come out.

`settings` validates a trainer's arguments, `session` holds what is open while it trains or
evaluates and is the World of its algorithm, `loop` takes the steps, `cpu_meter` and `call_budget`
count costs, `backends` builds engine and learner, `weight_sync_check` compares their weights.
`data` reads tasks, `collector` enqueues rollouts and gathers episodes, `in_flight` tracks groups
under way. `folder` is the run's folder, `manifest` its description, `checkpoints` and `resume`
restart it, `model_selection` keeps the best step, `rewards` computes rewards in the app's place,
`jsonl_log` appends lines that survive a kill. `results`, `statistics` and `sinks` report,
`listeners` are called after each step, `span_export` sends spans to a tracing backend, `alerts`
warns.
"""
