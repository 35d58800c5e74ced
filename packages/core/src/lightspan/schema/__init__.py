"""What both planes say to each other, as pure data. Nothing here reads a file, writes or waits.

`records` holds tasks, rollouts, attempts and the state machine that they follow, `tokens` what a
model call sampled, `reward` what an app returned. `spans` holds OpenTelemetry's spans,
`conventions` the names of their attributes, `call_attributes` the attributes of a model call's
request and answer. `messages`, `response_items` and `message_blocks` translate OpenAI's chat
messages and Responses items, and Anthropic's messages. `llm`, `routing`, `prompts`, `instructions`
and `resources` are what an algorithm hands to apps; `common_text` finds the template of an agent's
texts, by the `variable_parts` that one alone shows. `origins` are requests past the
SDKs. `prices` says what a model's tokens cost. `checks` refuses an option by its name, `texts`
makes fit to be kept what an app wrote: of `media` a reference, of a span's `content` what is no
key. `clock` tells the time, whatever the app makes of it; `randomness` gives the digits of ids.
"""
