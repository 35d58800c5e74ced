"""Build the environment variables of a program: task, endpoint, key and the user's variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from lightspan.capture.context import AttemptContext
from lightspan.runners.protocol import GATEWAY_VARIABLE

TASK_FILE_VARIABLE: Final = "LIGHTSPAN_TASK_FILE"
TASK_VARIABLE: Final = "LIGHTSPAN_TASK"
MODEL_VARIABLE: Final = "LIGHTSPAN_MODEL"
"""Variable with the name of the policy, for programs that must name a model."""

_AUTH_TOKEN: Final = "ANTHROPIC_AUTH_TOKEN"
RESERVED: Final = (
    *("LIGHTSPAN_", "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", _AUTH_TOKEN),
)
"""Prefixes of variables that `Command(env=)` must not contain."""
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})
_KEPT: Final = frozenset(
    {
        *("PATH", "LD_LIBRARY_PATH", "SHELL", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE"),
    }
)
"""Variables of the runner that a coding agent inherits, besides proxies and `LC_…`."""
TEMPORARY: Final = "tmp"
"""Folder in the HOME of a coding agent for temporary files."""


def program_environment(
    inherited: Mapping[str, str],
    extra: Mapping[str, str],
    scope: AttemptContext | None,
    model: str,
    task: Mapping[str, str],
) -> dict[str, str]:
    """Return all environment variables of an attempt's program.

    The program does not inherit lightspan's own variables, such as the store's address and key,
    nor the keys of endpoints that the gateway calls for frozen agents.

    Args:
        inherited: the runner's environment.
        extra: variables of `Command(env=)`.
        scope: context of the attempt; None outside a runner.
        model: value of `LIGHTSPAN_MODEL`.
        task: variables that contain or name the task.
    """
    endpoints = [] if scope is None else [target.endpoint for target in scope.routing.targets]
    secret = {endpoint.api_key_env for endpoint in endpoints if endpoint is not None}
    variables = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("LIGHTSPAN_") and name not in secret
    }
    variables |= extra
    return {**variables, **(_attempt_variables(scope, model, variables) if scope else {}), **task}


def clean_environment(
    inherited: Mapping[str, str], scope: AttemptContext | None, model: str, home: Path
) -> dict[str, str]:
    """Return the environment variables of a program with a HOME of its own.

    Args:
        inherited: the runner's environment.
        scope: context of the attempt; None for a program without an endpoint.
        model: value of `LIGHTSPAN_MODEL`.
        home: the program's HOME.
    """
    variables = {
        name: value
        for name, value in inherited.items()
        if name in _KEPT or name.startswith("LC_") or name.lower() in (*_PROXIES, "no_proxy")
    }
    variables |= {"HOME": str(home), "TMPDIR": str(home / TEMPORARY)}
    return variables | (_attempt_variables(scope, model, variables) if scope else {})


def _attempt_variables(
    scope: AttemptContext, model: str, others: Mapping[str, str]
) -> dict[str, str]:
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
        **_no_proxy(scope.gateway_url, others),
        GATEWAY_VARIABLE: scope.gateway_url,
        MODEL_VARIABLE: model,
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,  # read by older clients
        "OPENAI_API_KEY": scope.call_token,
        "ANTHROPIC_BASE_URL": scope.gateway_url,  # Anthropic's clients add the /v1
        "ANTHROPIC_API_KEY": scope.call_token,
        # Anthropic's clients send a token of the user in addition to our key, or in its place
        **({_AUTH_TOKEN: scope.call_token} if _AUTH_TOKEN in others else {}),
    }


def _no_proxy(url: str, others: Mapping[str, str]) -> dict[str, str]:
    """Return variables that exempt the gateway from a proxy; empty if there is no proxy.

    Args:
        url: base URL of the gateway.
        others: the other variables of the program, which may name a proxy.
    """
    if not any(name.lower() in _PROXIES for name in others):
        return {}
    host = urlsplit(url).hostname or ""
    before = others.get("no_proxy") or others.get("NO_PROXY") or ""
    value = ",".join(part for part in (before, host) if part)
    return {"no_proxy": value, "NO_PROXY": value}
