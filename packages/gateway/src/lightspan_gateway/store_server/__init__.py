"""The HTTP server of a store (`lightspan serve --store URL`).

Clients open the store by `open_store("https://…")`. `server` answers the operations of
`lightspan_gateway.remote_store.rpc`, `api_keys` authenticates, `gateway_proxy` forwards model calls
to the gateway of their training, `routes` is the protocol of plugins' routes, `responses` reads
bodies and encodes answers, `main` runs the server.
"""
