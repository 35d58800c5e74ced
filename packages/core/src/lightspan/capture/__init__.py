"""In the app's process: which agent acts, and what it asked the model.

`context` holds the current attempt and agents (types in `context_types`) in one ContextVar, `entry`
opens an attempt, `recorder` collects its spans. `sdk_instrumentation` wraps the clients of `sdks`,
also those imported later (`import_hooks`), redirects requests to `gateway_clients` and reads
answers in `response_observer`; `other_clients` records calls of clients that are not wrapped,
`uncaptured_http` notes their requests in a dry run, `prompt_overrides` replaces prompts, `emit` is
the API of a user's own code. `generator_context` keeps a block inside its generator,
`context_propagation` carries the context into threads, `misattributed_calls` detects where it could
not, `_globals` is the process-wide state, `to_otel` converts spans to the SDK's. Adapters use
`adapter`, `patch`, `agent_discovery` and `static_analysis` through `lightspan.instrumentation`.
"""
