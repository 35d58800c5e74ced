"""Record an app that is not being trained: its calls go where the app sends them.

`record` starts recording with `options`; each run of the app becomes an attempt (`auto_attempts`).
`redact` passes each span to the user's hook, and `store_writer` writes to the store in the
background. `feedback` scores an attempt later, `connect` sends calls to trained policies,
`apply_prompts` replaces prompts by learned prompts, and `exporters` finds the plugin that exports
spans to a tracing backend.
"""
