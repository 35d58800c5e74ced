"""Record an app that is not trained: its calls go where the app sends them.

`record` turns recording on, by `options`; each run becomes an attempt of `auto_attempts`. `redact`
passes each span to the user's hook, `store_writer` writes to the store in the background,
`feedback` scores an attempt later, `connect` sends calls to trained policies, `apply_prompts`
replaces prompts by learned ones, `span_exporter` exports spans to a tracing backend.
"""
