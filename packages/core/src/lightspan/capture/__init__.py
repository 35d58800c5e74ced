"""In the app's process: who is acting, and what it asked the model.

`scope` holds who acts (an attempt and a `stack` of agents) in one ContextVar, `entry` opens it,
`recorder` collects its spans. `wire` wraps the clients of `sdks`, one that nobody has imported once
somebody does (`imports`), hands requests to `clients` of ours and watches the `answers`; `bypass`
words calls of other clients, `uncaptured_http` notes their requests in a dry run; `candidates` are
the texts that agents are given in place of the app's; `emit` is what a person's own code may say.
`steps` keeps a block to its own generator; `threads` carries the scope along, `strays` are calls
where it could not. What changes the process as a whole is in `state`; `readable_spans` are ours as
OpenTelemetry's SDK has them. Adapters use `adapter`, `patch` (what they wrap) and `search` (the
agents of an app, by what its code `references`) through `lightspan.instrumentation`.
"""
