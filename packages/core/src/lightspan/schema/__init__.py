"""The data types that apps, stores and learners exchange. Pure: no files, no waiting.

`records` has tasks, rollouts, attempts and their state machine, `token_records` the sampled tokens
of a model call, `reward` rewards, `spans` OpenTelemetry's spans, `semconv` the names of their
attributes, `genai_attributes` those of a model call. `genai_messages`, `openai_responses` and
`anthropic_messages` translate messages. `llm`, `routing`, `prompts` and `resources` are what an
algorithm gives to apps; `system_prompts` finds and replaces a system prompt. `validation` checks
options, `redaction` sanitises text, `content` removes keys from a span, `media` replaces images by
references, `images` has their bytes and their places among token ids, `clock` reads the time, `ids`
makes ids.
"""
