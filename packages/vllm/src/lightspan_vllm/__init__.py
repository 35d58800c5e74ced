"""vLLM servers as a token engine: prompt ids in, sampled ids and their log-probabilities out.

Start with `engine`, the engine, and `config`, its settings (`lightspan.VLLM`).

| module | purpose |
|---|---|
| `server_pool` | routes calls to the servers of some policies; retries and resumes calls |
| `supervised_server` | starts, checks, updates and restarts one server |
| `load_balancer` | picks a server for a call |
| `request` | a request that can be resumed |
| `client` | HTTP client of a server |
| `requirements` | checks that a server has the flags it needs |
| `weight_sync_check` | compares the weights of servers and learner |
| `process` | runs a server process |
| `weights`, `broadcast` | write weights into files; send them over the network |

vLLM's own process loads `vllm_plugin/lightspan_vllm_plugin` and `vllm_plugin/lightspan_broadcast`.
No module here imports the plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_vllm.config import VLLM as VLLM

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"VLLM": "lightspan_vllm.config"})
