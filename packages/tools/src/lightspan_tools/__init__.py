"""What a person reads before and after a training.

`dry_run` reports what `fit` would do, `inspect` describes a run, a rollout or a call, `export`
writes files, `rescore` compares another reward, `plots` draws learning curves, `sinks` send metrics
to TensorBoard, W&B, MLflow and Trackio. `rollout_view` joins a rollout with its episode and
coverage, `pagination` lists many. `commands` are the subcommands of `lightspan`.
"""
