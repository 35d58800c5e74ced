"""Runners run the app: they claim an attempt, call the app in its context, and report its outcome.

`app` is what is run (`@rollout` and its arguments), `command` a program in any language as an app.
`runner` is the loop, `attempt` runs one attempt, `outcome` interprets an app's return value or
exception. `protocol` defines a set of runners: `local` processes of this machine (`process_main` is
their entry point, `foreign_python` starts those of another interpreter) or `external` ones that
somebody starts by hand (`standalone`); those and the trainer find each other by `discovery` in the
store, and `gateway_probe` checks that the gateway answers.

An app may block, hang or kill its process. `loop_watchdog` detects a blocked event loop, and
`stack_location` names the line of the app; `local` detects dead and silent processes,
`crash_recovery` queues their attempts again, and `lightspan.child_processes` ends what they
started.
"""
