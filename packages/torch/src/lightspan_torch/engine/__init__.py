"""The embedded engine: prompt ids in, sampled ids and their log-probabilities out.

`config` is `lightspan.Transformers`, `transformers` the engine, `_batcher` its generation thread
over `_pages` (key-value cache and shared prefixes), `_attention` and `_sampling`. `positions`
measures how long sequences in one batch may be, `tokenizer` renders chats and decodes ids,
`grammars` masks tokens by a grammar, `hub` locates a model's files, `parameter_count` sizes a model
without loading it, `weights` loads, hashes and replaces weights, `lora` applies adapters,
`request_checks` validates requests, `oom` explains out-of-memory errors.
"""
