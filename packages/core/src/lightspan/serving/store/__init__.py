"""A store behind HTTP, `lightspan serve --store URL`: `open_store("https://…")` opens it elsewhere.

`server` answers the operations of `lightspan.stores.remote.rpc`, `keys` knows who asks, `relay`
forwards model calls to the gateway of their training, `telemetry` takes OpenTelemetry's traces,
`replies` reads bodies and makes answers, and `process` runs the server until it is told to stop.
"""
