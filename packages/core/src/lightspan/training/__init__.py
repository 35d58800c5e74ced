"""What a `Trainer` runs: an app, an algorithm and tasks go in, a better model and a run's folder
come out.

`settings` is what a trainer was given. `session` is everything that is open while it trains or
evaluates, and the World of its algorithm; `loop` takes the steps, `meter` and `budget` count what
they cost; `embedded` makes the engine and learner of this process, `likeness` says whether they
have the same weights. `data` reads tasks, `collector` enqueues rollouts and gathers their episodes;
`flights` are those that go on while weights update. `folder` is the run's folder, `manifest` what
it says of the run, `trust` who has it from whom; `checkpoints` and `resume` are how it goes on,
`best_step` whose weights are kept. `rewards` gives rewards in the app's place, by a function or a
`judge`, which is asked `ballots`; `lines` are files that grow. `results`, `statistics`, `plots` and
`sinks` tell how it went, `symptoms` what is wrong with it; `span_export` sends its spans to a
tracing backend.
"""
