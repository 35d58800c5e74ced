"""Test the advice about model requests that bypass the SDKs, word for word."""

from __future__ import annotations

import pytest

from lightspan_tools.uncaptured_requests import Request, fix_of

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
