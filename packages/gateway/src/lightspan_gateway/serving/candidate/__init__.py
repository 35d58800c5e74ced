"""`lightspan serve RUN --candidate NEW`: a share of attempts is answered by other weights.

`sides` has the pure rules: which side an attempt is on, which requests belong together, and the
name by which a record shows the weights. `state` keeps the comparison and the attempts under way in
a file. `access` applies both to requests, and `gateway` adds the URLs for status and decisions.
`comparison` computes the difference of the sides from a store, `client` reads and changes the state
in a file or of a running server.
"""
