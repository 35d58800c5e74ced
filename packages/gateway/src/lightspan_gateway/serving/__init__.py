"""`lightspan serve RUN`: a run's policies, or a model's folder, at one OpenAI-compatible endpoint.

`endpoint` loads the models and runs the server, `model_folder` describes a model's folder,
`public_access` is the access policy and counts usage, `loopback` checks for addresses of this
machine, `signals` handles SIGINT and SIGTERM.
"""
