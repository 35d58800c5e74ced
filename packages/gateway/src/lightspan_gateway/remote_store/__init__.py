"""The client of a store that another process serves over HTTP (`lightspan serve --store URL`).

`store` is the store, `url` parses its address and key, `client` sends requests by aiohttp, which
`request_batcher` combines. Client and server (`lightspan_gateway.store_server`) share the table of
operations in `rpc`, the roles of keys in `roles` and the form of failures in `errors`.
"""
