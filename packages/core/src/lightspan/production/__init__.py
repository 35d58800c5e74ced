"""An app that is recorded and not trained: its calls go where it points them.

`record` turns it on, by `options`; every run becomes an `attempt`. `redact` shows each span to the
user's hook first, `journal` writes to the store behind the app's back, `feedback` scores an attempt
later, `connect` sends calls to the policies that were trained from it, and `apply_prompts`
replaces prompts by those that were learned. `span_exporter` exports spans to a tracing backend.
"""
