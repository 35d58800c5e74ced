"""A store that another process serves over HTTP (`lightspan serve --store URL`): the client.

`store` is the store as callers see it, `address` its URL and its key. `operations` is the table of
what can be asked, of which the server (`lightspan.serving.store`) has the other end, `roles` who
may ask it, and `errors` how each end says what went wrong. `connection` sends what is asked, again
where no answer came, `handovers` has it cross from thread to thread, and `batches` has what is
asked at the same time travel together;
`exchanges` speaks HTTP, and is all that needs httptools. `proofs` are what a runner shows of its
claims, `values` tells how many a body holds.
"""
