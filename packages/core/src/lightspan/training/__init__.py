"""What a `Trainer` runs: an app, an algorithm and tasks go in, a better model and a run's folder
come out.

`settings` is what a trainer was given. `session` is everything that is open while it trains or
evaluates, and the World of its algorithm; `loop` takes the steps, `meter` and `budget` count what
they cost; `backends` builds the engine and the learner, `likeness` says whether they
have the same weights. `data` reads tasks, `collector` enqueues rollouts and gathers their episodes;
`in_flight` has those that are under way. `folder` is the run's folder, `manifest` what
it says of the run, `checkpoints` and `resume` are how it goes on,
`best_step` whose weights are kept. `rewards` gives rewards in the app's place, by a function or a
`judge`, which is asked `ballots`; `lines` are files that grow. `results`, `statistics`, `plots` and
`sinks` tell how it went, `span_export` sends spans to a tracing backend, `alerts` what is wrong.
"""
