"""Capture of agents, model calls and rewards in the app's process.

- `context`: the current attempt and agents, in one ContextVar; `context_types` has their types.
- `entry`: opens an attempt; `recorder` collects its spans.
- `sdk_instrumentation`: wraps the clients of the SDKs in `sdks`, also of those imported later
  (`import_hooks`). It sends their requests through `gateway_clients`, and reads the answers by
  `response_observer`.
- `other_clients`: records calls of clients that are not wrapped.
- `prompt_overrides`: replaces prompts.
- `emit`: the API for an app's own code.
- `generator_context`: restricts a `with` block in a generator to the generator's own steps.
- `context_propagation`: copies the context into threads.
- `misattributed_calls`: detects calls without the right context.
- `_globals`: the process-wide state.
- `adapter`, `patch`, `agent_discovery`, `static_analysis`: for adapters of frameworks, which use
  them through `lightspan.instrumentation`.
"""
