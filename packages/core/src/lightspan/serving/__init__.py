"""`lightspan serve`: trained policies at one OpenAI-compatible endpoint, or a store behind HTTP.

In goes the folder of a finished run, or that of a model (`model_folder`), out come answers to
whoever may call: `endpoint` loads what is there and serves it, `visitors` has the gateway's terms
for those who use it and counts them. `loopback` knows this machine, `signals` when to stop.

`store` is the other kind of server, `lightspan serve --store URL`: trainers and runners of other
machines meet in it.
"""
