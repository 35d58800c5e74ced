"""Runners: claim attempts, call the app in an attempt's context, report the outcomes.

`app` wraps the user's function (`@rollout`), `program` is the interface of apps that are programs.
`runner` is the claim loop, `attempt` runs one attempt, `outcome` maps an app's return value or
exception to an outcome. `protocol` defines the interface of a set of runners. `local` implements it
by processes on this machine: `process_main` is their entry point, and `foreign_python` starts them
in another interpreter. `discovery` announces a trainer to runners that are started by hand
(lightspan-cluster).

An app may block, hang or kill its process. `loop_watchdog` detects a blocked event loop, and
`stack_location` names the line of the app that blocks the loop. `local` detects processes that died
or send no status, `crash_recovery` requeues their attempts, and `lightspan.child_processes` ends
their child processes. `gateway_probe` checks that the gateway answers.
"""
