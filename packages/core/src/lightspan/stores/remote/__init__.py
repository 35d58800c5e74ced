"""The client of a store that another process serves over HTTP (`lightspan serve --store URL`).

`store` is the store that callers use, `address` its URL and key, `client` sends its requests by
aiohttp (`lightspan[http]`), which `request_batcher` combines. Client and server
(`lightspan.serving.store`) share the table of operations in `rpc`, the roles of keys in `roles` and
the form of failures in `errors`.
"""
