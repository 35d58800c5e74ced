"""Embedded engine: generates answers, as token ids and log-probabilities, in this process.

Start with `transformers`, the engine, and `config`, its settings (`lightspan.Transformers`).

| module | purpose |
|---|---|
| `_batcher` | thread that generates for one policy |
| `_pages` | key-value cache, with shared prefixes |
| `_attention`, `_sampling` | attention over the cache; choice of the next token |
| `positions` | how long the sequences of one batch may be |
| `tokenizer` | renders chats as token ids, and decodes ids |
| `grammars` | masks tokens that a grammar forbids |
| `hub` | locates a model's files |
| `parameter_count` | computes a model's size without loading it |
| `weights`, `lora` | load, hash and replace weights; apply LoRA |
| `request_checks` | validates requests |
| `oom` | explains out-of-memory errors |
"""
