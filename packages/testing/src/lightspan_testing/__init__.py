"""Conformance suites and fakes for implementations of lightspan's protocols.

Each suite is a class of tests to subclass: `store_suite`, `engine_suite`, `lora_suite`,
`image_suite`, `chat_engine_suite`, `learner_suite`, `gateway_suite`, `adapter_suite`,
`runners_suite` (with `sample_apps`). In place of language models there are `scripted` (an OpenAI
server, with `scripted_responses` and `scripted_messages`), `scripted_engine`, and the random models
of `tiny` and, with images, `tiny_vision`.
`adapter_harness` combines the scripted server and engine for adapters. `strategies` generates
attempts for hypothesis, `attempts` reads recorded ones, and `wait` polls. `permuted_rewards` is an
algorithm that must not learn. Submodules are imported on first use, because they need pytest, which
lightspan does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightspan_testing.adapter_suite import AdapterSuite
    from lightspan_testing.chat_engine_suite import ChatEngineSuite
    from lightspan_testing.store_suite import StoreSuite

__all__ = ["AdapterSuite", "ChatEngineSuite", "StoreSuite"]

_HOMES: Final = {
    "AdapterSuite": "lightspan_testing.adapter_suite",
    "ChatEngineSuite": "lightspan_testing.chat_engine_suite",
    "StoreSuite": "lightspan_testing.store_suite",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("lightspan", "lightspan_testing"):
            raise
        from lightspan.errors import how_to_install

        raise ModuleNotFoundError(
            f"lightspan_testing.{name} needs {error.name!r}: {how_to_install('http')}",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return __all__
