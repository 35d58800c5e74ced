"""CPU that the shim adds to a model call of the OpenAI SDK, in a scope and outside.

The transport is a stub inside the SDK's HTTP client, so that nothing but the SDK and the shim
works. Run: python benchmarks/wire.py
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import openai

from lightspan import wire
from lightspan.emit import agent
from lightspan.routing import Route, Routing, Rule, Target
from lightspan.scope import Scope, open_scope
from lightspan.testing.scripted import Reply, completion

MESSAGES: Any = [{"role": "user", "content": "How many singers are there? " * 8}]
OUTSIDE_TARGET_US = 10.0


def transport() -> Any:
    """An HTTP client of the SDK's own kind that answers by itself."""
    base = next(k for k in openai.DefaultHttpxClient.__mro__ if k.__module__.startswith("httpx"))
    httpx = importlib.import_module(base.__module__.split(".")[0])
    body = completion({"model": "m", "messages": MESSAGES}, [Reply(text="There are six.")])
    return httpx.MockTransport(lambda request: httpx.Response(200, json=body))


def cost(ask: Callable[[], Any], calls: int) -> float:
    """Microseconds of CPU per call."""
    started = time.process_time()
    for _ in range(calls):
        ask()
    return (time.process_time() - started) / calls * 1e6


def main() -> int:
    """See the module; the exit status says whether the target is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    http = openai.DefaultHttpxClient(transport=transport())
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", http_client=http)
    routing = Routing(rules=[Rule("writer", Target(route=Route.POLICY, policy="policy"))])
    scope = Scope(rollout_id="r", attempt_id="a", gateway_url="http://127.0.0.1:9", routing=routing)
    clean = openai.DefaultHttpxClient(transport=transport())
    wire._sync_clients["http://127.0.0.1:9"] = wire._bare(
        openai.OpenAI, "http://127.0.0.1:9", clean
    )

    def ask() -> Any:
        return client.chat.completions.create(model="m", messages=MESSAGES)

    def asks(name: str | None) -> float:
        block = nullcontext() if name is None else open_scope(scope)
        with block, agent(name or "nobody"):
            return cost(ask, options.calls)

    kinds: dict[str, list[float]] = {"plain": [], "outside": [], "redirected": [], "recorded": []}
    for _ in range(options.rounds):
        wire.uninstall()
        kinds["plain"].append(asks(None))
        wire.install()
        kinds["outside"].append(asks(None))
        kinds["redirected"].append(asks("writer"))
        kinds["recorded"].append(asks("checker"))
        scope.recorder.drain()
    middle = {kind: statistics.median(values) for kind, values in kinds.items()}
    print(f"the SDK alone: {middle['plain']:.1f} us of CPU per call")
    for kind in ("outside", "redirected", "recorded"):
        print(f"{kind}: {middle[kind] - middle['plain']:+.1f} us per call by the shim")
    bare = _shim_alone(options.calls * 100)
    print(f"outside a scope, the wrapper alone: {bare:.2f} us per call")
    print(f"reach: < {OUTSIDE_TARGET_US:g} us outside a scope")
    wire.uninstall()
    wire.close()
    client.close()
    return 0 if bare < OUTSIDE_TARGET_US else 1


def _shim_alone(calls: int) -> float:
    """The wrapper around a function that does nothing, against that function."""

    def nothing(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> None: ...

    shim = wire._sync_shim(nothing, wire._Switch())
    wrapped = cost(lambda: shim(None, None, None, stream=False), calls)
    return wrapped - cost(lambda: nothing(None, None, None, stream=False), calls)


if __name__ == "__main__":
    sys.exit(main())
