"""The environment of a program: its task, its endpoint and key, and the user's own variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from lightspan.capture.context import AttemptContext
from lightspan.schema.routing import Routing

TOKEN_VARIABLE: Final = "LIGHTSPAN_CALL_TOKEN"
GATEWAY_VARIABLE: Final = "LIGHTSPAN_GATEWAY_URL"
"""The gateway's origin: an agent's calls go to `$LIGHTSPAN_GATEWAY_URL/agents/NAME/v1`."""
TASK_FILE_VARIABLE: Final = "LIGHTSPAN_TASK_FILE"
TASK_VARIABLE: Final = "LIGHTSPAN_TASK"
MODEL_VARIABLE: Final = "LIGHTSPAN_MODEL"
"""The policy's name, for programs that have to name a model."""

_AUTH_TOKEN: Final = "ANTHROPIC_AUTH_TOKEN"
OURS: Final = (
    *("LIGHTSPAN_", "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", _AUTH_TOKEN),
)
"""How the names begin that only lightspan sets."""
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})


def program_environment(
    inherited: Mapping[str, str],
    extra: Mapping[str, str],
    scope: AttemptContext | None,
    model: str,
    task: Mapping[str, str],
) -> dict[str, str]:
    """The whole environment of an attempt's program.

    The user's own variables stay. What a runner may know beside them does not: variables of
    lightspan's (the store's address and its key among them), and the keys of endpoints that the
    gateway asks for frozen agents.

    Args:
        inherited: the runner's.
        extra: set by the user.
        scope: of the attempt; None outside a runner.
        model: for `LIGHTSPAN_MODEL`.
        task: the variables that say where the task is.
    """
    secret = _key_names(scope.routing) if scope is not None else set()
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("LIGHTSPAN_") and name not in secret
    }
    return {**kept, **extra, **_of_attempt(scope, model, {**kept, **extra}), **task}


def _of_attempt(
    scope: AttemptContext | None, model: str, others: Mapping[str, str]
) -> dict[str, str]:
    if scope is None:
        return {}
    ids = {
        "LIGHTSPAN_ROLLOUT_ID": scope.rollout_id,
        "LIGHTSPAN_ATTEMPT_ID": scope.attempt_id,
        "LIGHTSPAN_MODE": scope.mode.value,
    }
    if scope.gateway_url is None:
        return ids
    url = f"{scope.gateway_url}/v1"
    return {
        **ids,
        **_past_proxies(scope.gateway_url, others),
        GATEWAY_VARIABLE: scope.gateway_url,
        MODEL_VARIABLE: model,
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,  # what older clients read
        "OPENAI_API_KEY": scope.call_token,
        "ANTHROPIC_BASE_URL": scope.gateway_url,  # its clients add the /v1
        "ANTHROPIC_API_KEY": scope.call_token,
        # whoever has it reads it; with a user's own it would travel beside our key, or before it
        **({_AUTH_TOKEN: scope.call_token} if _AUTH_TOKEN in others else {}),
    }


def _past_proxies(url: str, others: Mapping[str, str]) -> dict[str, str]:
    """Variables that let calls reach the gateway where the user's environment names a proxy."""
    if not any(name.lower() in _PROXIES for name in others):
        return {}
    host = urlsplit(url).hostname or ""
    before = others.get("no_proxy") or others.get("NO_PROXY") or ""
    value = ",".join(part for part in (before, host) if part)
    return {"no_proxy": value, "NO_PROXY": value}


def _key_names(routing: Routing) -> set[str]:
    """The variables that hold keys of endpoints behind the gateway."""
    targets = [*(rule.target for rule in routing.rules), routing.default]
    return {t.endpoint.api_key_env for t in targets if t.endpoint and t.endpoint.api_key_env}
