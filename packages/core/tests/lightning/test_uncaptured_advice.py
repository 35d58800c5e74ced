"""Test the advice about model requests that bypass the SDKs, word for word."""

from __future__ import annotations

import json

import pytest

from lightspan.lightning.episode import build_episode
from lightspan.lightning.rollout_checks import why_no_call
from lightspan.lightning.uncaptured_advice import fix_of
from lightspan.schema import semconv as c
from lightspan.schema.provenance import Request
from lightspan.schema.spans import SpanKind
from lightspan_testing.strategies import make_attempt, make_rollout, make_span

PLAIN = Request("writer", "my_app", "mine", "http://host:1/v1/chat/completions")
GROQ = Request("writer", "litellm", "llama-3", "https://api.groq.com/openai/v1/chat/completions")
SEEN = (
    " and its key as api_key=, and call Chat Completions: LiteLLM then uses the OpenAI SDK, "
    "which lightspan sees"
)


@pytest.mark.parametrize(
    ("request_", "fix"),
    [
        (
            GROQ,
            'name its model "openai/llama-3", with api_base="https://api.groq.com/openai/v1"'
            + SEEN,
        ),
        (
            GROQ._replace(url="https://api.anthropic.com/v1/messages"),
            'name its model "openai/llama-3", with api_base= of an endpoint with OpenAI\'s '
            f"API{SEEN}",
        ),
        (PLAIN, 'use the OpenAI SDK in its place, with base_url="http://host:1/v1"'),
        (
            PLAIN._replace(url="http://host:1/v2/chat"),
            "use the OpenAI SDK in its place, at an endpoint with OpenAI's API",
        ),
    ],
)
def test_fixes(request_: Request, fix: str) -> None:
    assert fix_of(request_) == fix


def test_fit_names_what_was_asked_where_no_call_was_seen() -> None:
    told = json.dumps([[*GROQ, 2], [*PLAIN, 1]])
    root = make_span("root", SpanKind.CHAIN, attributes={c.REQUESTS_PAST: told})
    episode = build_episode(make_attempt(), make_rollout(), [root], [])
    assert why_no_call([episode]) == (
        "the app made no model call through the OpenAI SDK in its own process, nor to "
        "OPENAI_BASE_URL; it asked llama-3 at api.groq.com by litellm, mine at host:1 by my_app, "
        "which lightspan does not see (rollouts: 1). For litellm, "
        f"{fix_of(GROQ)}. For my_app, {fix_of(PLAIN)}"
    )
