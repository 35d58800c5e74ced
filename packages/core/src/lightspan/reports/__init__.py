"""Reports: what a person reads before and after training.

Before: `dry_run` takes an app and a few tasks and says what `fit` would do, and `forecast` what
memory and time it would take, with `server_memory` for vLLM's part of it and `shard_memory` for
that of verl's ranks. After: a run's folder or a store of production goes in; `inspect` gives text
about a run, a rollout or a call, `export` files for other programs, `rescore` what another reward
would change. They look through `views`, a rollout with its episode and with what became of each of
its calls; `table` is a page of many.
"""
