"""vLLM servers as a token engine: prompt ids in, sampled ids and their log-probabilities out.

`description` is what a user writes, `lightspan.VLLM`. `engine` is the engine; of it `lanes` has the
calls of policies that share servers, `servers` keeps one server with the weights of now, `jobs` is
one call on its way, `balance` says which server it goes to. `client` speaks with a server, `checks`
says what a server has to be, `process` runs one, `weights` puts a model or LoRA where servers read
it, and `broadcast` sends it to those that do not. `inside/lightspan_vllm` is loaded in vLLM's own
process, and nothing here imports it; `inside/lightspan_broadcast`, which it loads, is the other end
of `broadcast`.
"""
