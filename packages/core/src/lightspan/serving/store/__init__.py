"""A store behind HTTP, `lightspan serve --store URL`: `open_store("https://…")` opens it elsewhere.

`server` answers what `lightspan.stores.remote.operations` lists, `keys` knows who asks, `limits`
what a runner may ask and see, `relay` hands model calls on to the gateway of their training,
`telemetry` takes OpenTelemetry's traces, `gate` lets in as many as there is room for, `replies`
says what came of it, `metrics` counts, and `process` runs it until it is told to stop.
"""
