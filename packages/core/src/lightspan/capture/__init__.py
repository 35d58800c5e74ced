"""Capture of agents, model calls and rewards in the app's process.

`context` holds the current attempt and agents (types in `context_types`) in one ContextVar, `entry`
opens an attempt, `recorder` collects its spans. `sdk_instrumentation` wraps the clients of `sdks`,
also those imported later (`import_hooks`), redirects requests to `gateway_clients` and reads
answers in `response_observer`. `other_clients` records calls of clients that are not wrapped, and
`uncaptured_http` records their requests in a dry run. `prompt_overrides` replaces prompts, and
`emit` is the API for an app's own code. `generator_context` restricts a block to its generator,
`context_propagation` copies the context into threads, `misattributed_calls` detects calls without
the right context, and `_globals` is the process-wide state. Adapters use `adapter`, `patch`,
`agent_discovery` and `static_analysis` through `lightspan.instrumentation`.
"""
