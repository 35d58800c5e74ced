"""Run coding agents of Harbor as an app: in sandboxes, on task suites, with verifiers as reward.

`app` is the app's configuration and one attempt of it, `tasks` reads a suite, `trial_host` is the
runner's side of a host process, `host` is this process, which runs trials by Harbor, and `command`
is `lightspan harbor`. Only `host` imports Harbor.
"""

from lightspan_harbor.app import HarborTrial, trial
from lightspan_harbor.tasks import HarborTasks

__all__ = ["HarborTasks", "HarborTrial", "trial"]
