"""A store behind HTTP, `lightspan serve --store URL`: `open_store("https://…")` opens it elsewhere.

`server` answers the operations of `lightspan_gateway.remote_store.rpc`, `api_keys` authenticates,
`gateway_proxy` forwards model calls to the gateway of their training, `routes` is the protocol of a
plugin's route, `responses` reads bodies and makes answers, `main` runs the server.
"""
