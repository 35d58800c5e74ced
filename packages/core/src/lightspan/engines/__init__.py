"""Engines generate tokens: prompt ids in, sampled ids and their log-probabilities out.

`protocol` says what an engine is; another kind of engine is another module here. `transformers` is
the embedded one, with `_batcher` around transformers' continuous batching, `_prefixes` for prompts
that begin alike and `_request_attention` for CPUs. `vllm` has servers of vLLM do it. `openai` asks
any endpoint. `hub` finds a model's files, `sizes` counts its parameters without loading it,
`weights` loads, hashes and replaces them, `low_rank` has LoRA beside them, `tokenizer` renders
chats and reads ids, `grammars` says what may come next in an answer that is held to a form,
`out_of_memory` says what to lower where memory ran out.
"""
