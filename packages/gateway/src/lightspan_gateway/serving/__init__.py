"""`lightspan serve RUN`: a run's policies, or a model's folder, at one OpenAI-compatible endpoint.

`endpoint` loads what is served, `model_folder` recognises a model, `public_access` is the access
policy and counts usage, `loopback` knows this machine's addresses, `signals` stops the server.
"""
