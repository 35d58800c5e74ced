"""The client of a store that another process serves over HTTP (`lightspan serve --store URL`).

`store` is the store, `url` parses its URL and reads its key, `client` sends requests by aiohttp,
and `request_batcher` combines them. Client and server (`lightspan_gateway.store_server`) share the
table of operations in `rpc`, the roles of keys in `roles` and the encoding of errors in `errors`.
"""
