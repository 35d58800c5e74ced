"""vLLM servers as a token engine: prompt ids in, sampled ids and their log-probabilities out.

`config` is `lightspan.VLLM`. `engine` is the engine; `server_pool` routes and retries calls on
shared servers and updates the servers, `supervised_server` starts, restarts and updates one server,
`request` is a resumable request, `load_balancer` picks a server. `client` is the HTTP client,
`requirements` checks a server, `process` runs one, `weights` writes weights into files, `broadcast`
sends them over the network. vLLM's own process loads `vllm_plugin/lightspan_vllm_plugin` and
`vllm_plugin/lightspan_broadcast`; no module here imports the plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_vllm.config import VLLM as VLLM

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"VLLM": "lightspan_vllm.config"})
