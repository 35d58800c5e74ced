"""A client of a chat endpoint that waits while the endpoint is busy or away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightspan.capture.gateway_clients import mark_clean
from lightspan.errors import EngineError, how_to_install
from lightspan.schema.llm import LLM
from lightspan.schema.redaction import clean_text

if TYPE_CHECKING:
    import openai

TRIES: Final = 4
"""Of a question that nobody answers; one that is put off (429) has as many as it takes."""
PAUSE_S: Final = 1.0
"""Before the second try; doubled before each further one."""
MAX_PAUSE_S: Final = 60.0
_HOPELESS: Final = ("insufficient_quota", "billing_not_active")
"""Codes of a 429 that no waiting helps."""


class Answer(NamedTuple):
    """An answer of the model."""

    text: str
    finish_reason: str
    input_tokens: int
    output_tokens: int


class EndpointClient:
    """Ask the model of an endpoint, and ask again while it is busy or away.

    Args:
        llm: the endpoint.
        timeout_s: of one question; None for what the client has.
        patience_s: how long in all a question is put off (429).
        note: told when there is something to wait for.
        client: of somebody else, who closes it; None for one of its own, which it closes.
        role: what the model is called where people read of it.

    Raises:
        ModuleNotFoundError: the OpenAI SDK is missing.
        ConfigError: the key is not set.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        timeout_s: float | None,
        patience_s: float,
        note: Callable[[str], None],
        client: openai.AsyncOpenAI | None = None,
        role: str = "reflection model",
    ) -> None:
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"the {role} needs {error.name!r}: {how_to_install('prompts')}", name=error.name
            ) from error
        self._llm = llm
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._note = note
        self._role = role
        # a client's own retries do not say that they wait, and give up a 429 soon
        options: Any = {"max_retries": 0}
        if timeout_s is not None:
            options["timeout"] = timeout_s
        self._owned = client is None
        if client is None:
            client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, **options)
        else:
            client = client.with_options(**options)
        self._client = client
        mark_clean(client)

    @property
    def model(self) -> str:
        """The name of the model that is asked."""
        return self._llm.model

    async def close(self) -> None:
        if self._owned:
            await self._client.close()

    async def ask(self, text: str) -> Answer:
        """Return the model's answer.

        Raises:
            EngineError: it does not answer.
        """
        import openai

        tries, waited, pause = 0, 0.0, PAUSE_S
        while True:
            try:
                # the client's own is of silence, which an endpoint that sends blanks never keeps
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask(text)
            except openai.RateLimitError as error:
                wait = _asked_to_wait(error) or pause
                if error.code in _HOPELESS or waited + wait > self._patience_s:
                    raise self._failed(error) from error
                if not waited:
                    self._note(f"the {self._role} is busy (429): waiting {wait:.0f} s")
                waited += wait
            except (
                openai.APIConnectionError,
                openai.InternalServerError,
                json.JSONDecodeError,  # a body that was cut off
                TimeoutError,
            ) as error:
                tries += 1
                if tries == TRIES:
                    raise self._failed(error) from error
                wait = pause
            except openai.OpenAIError as error:
                raise self._failed(error) from error
            await asyncio.sleep(wait)
            pause = min(2 * pause, MAX_PAUSE_S)

    async def _ask(self, text: str) -> Answer:
        messages: Any = [{"role": "user", "content": text}]
        reply = await self._client.chat.completions.create(
            model=self._llm.model, messages=messages, **self._llm.sampling
        )
        choices = getattr(reply, "choices", None)
        if not isinstance(choices, list) or not choices:  # an endpoint may answer 200 with anything
            raise EngineError(f"{self._where} answered with no choice: {str(reply)[:200]!r}")
        choice, usage = choices[0], reply.usage
        return Answer(
            text=clean_text(_said(getattr(choice, "message", None))),
            finish_reason=str(getattr(choice, "finish_reason", None)),
            input_tokens=_count(usage, "prompt_tokens"),
            output_tokens=_count(usage, "completion_tokens"),
        )

    @property
    def _where(self) -> str:
        return f"the {self._role} {self._llm.model} at {self._llm.base_url}"

    def _failed(self, error: Exception) -> EngineError:
        said = str(error) or f"no whole answer within {self._timeout_s} s"
        return EngineError(
            f"{self._where} failed: {type(error).__name__}: {said}; what was learned so far is "
            "kept: go on with resume=True"
        )


def _said(message: Any) -> str:
    """The text of an answer, which some endpoints give in parts, or not at all: the SDK's types
    promise what nobody has checked."""
    content = getattr(message, "content", None) or getattr(message, "refusal", None)
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))


def _count(usage: Any, name: str) -> int:
    """Tokens; 0 where an endpoint does not count them."""
    count = getattr(usage, name, None)
    return count if isinstance(count, int) else 0


def _asked_to_wait(error: openai.APIStatusError) -> float | None:
    """The seconds that an endpoint asks to be left alone; None if it does not say."""
    for header, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(error.response.headers[header]) * unit)
        except (KeyError, ValueError):
            continue
    return None
