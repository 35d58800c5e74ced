"""Runners run the app: they claim an attempt, call the app in its scope, and report its outcome.

`app` is what is run (`@rollout` and its arguments), `command` a program in any language as an app.
`runner` is the loop, `attempt` what it does with one attempt, and `outcome` says what an app's
return value or exception means. `protocol` says what a set of runners is: `local` processes of this
machine (`worker` inside them, `interpreters` for those of the app's own Python), `cluster` actors
of a Ray cluster (`actor` is what is on a node, `membership` how one is joined), or `external` ones
that somebody starts by hand. Such a one is a `joiner`; it and the trainer find each other in the
store by `peers`, and `reachability` says whether its gateway is there.

An app may block, hang or kill the process it runs in. A `guard` in the process sees what blocks
its loop, and by `whereabouts` which line of the app; `local` sees what is dead or silent, and
`deaths` queues its attempts again. Where it has to be ended, `lightspan.child_processes` ends what
it started.
"""
