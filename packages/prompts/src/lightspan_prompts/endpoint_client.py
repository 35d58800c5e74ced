"""Client of a chat endpoint with retries and backoff."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from asyncio import sleep
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightspan.capture.gateway_clients import mark_clean
from lightspan.errors import EngineError, how_to_install
from lightspan.schema.images import ImageReader
from lightspan.schema.llm import LLM
from lightspan.schema.redaction import clean_text
from lightspan_prompts.transcript import IMAGE_REFERENCE

if TYPE_CHECKING:
    import openai

MAX_TRIES: Final = 4
"""Maximum tries per request. Rate limits (429) do not count; `patience_s` limits their retries."""
MAX_RETRY_BACKOFF_S: Final = 60.0
MIN_WAIT_S: Final = 0.1
"""Minimum seconds of waiting where an endpoint asks for none (`Retry-After: 0`)."""
WAIT_GROWTH: Final = 0.1
"""Minimum share of the seconds waited so far that a request waits again."""
LONG_WAIT_S: Final = 5.0
"""Seconds from which a wait on a rate limit is noted; shorter ones of a request are noted once, if
they add up to as much."""
CUT_OFF: Final = ("length", "content_filter")
"""Values of `Answer.finish_reason` if the endpoint ended the answer before the model did."""
_PERMANENT_CODES: Final = ("insufficient_quota", "billing_not_active")
"""Error codes of a 429 response for which a retry is useless."""


class Answer(NamedTuple):
    """An answer of the model."""

    text: str
    finish_reason: str
    input_tokens: int
    output_tokens: int


class EndpointClient:
    """Client of a chat endpoint that retries while the endpoint is busy or unreachable.

    Args:
        llm: the endpoint.
        timeout_s: seconds per request; None for the client's default.
        patience_s: total seconds of waiting on rate limits (429) per request.
        note: called with a message on long waits for rate limits.
        client: OpenAI client that the caller closes; None to create one.
        role: what the model is called in messages, such as `judge`.
        images: returns recorded images by digest; None if the model sees none.
        max_images: maximum number of images per request. Those that the text names first are sent.
        retry_backoff_s: seconds before the first retry; doubled before each further retry.

    Raises:
        ModuleNotFoundError: the OpenAI SDK is missing.
        ConfigError: the API key is not set.
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
        images: ImageReader | None = None,
        max_images: int = 0,
        retry_backoff_s: float = 1.0,
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
        self._images = images
        self._max_images = max_images
        self._retry_backoff_s = retry_backoff_s
        # The SDK's own retries are silent and give up on a 429 early.
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
        """Return the model's name."""
        return self._llm.model

    async def aclose(self) -> None:
        if self._owned:
            await self._client.close()

    async def ask(self, text: str) -> Answer:
        """Send `text` as a user message and return the model's answer.

        Raises:
            EngineError: the endpoint fails.
        """
        import openai

        tries, waited, pause = 0, 0.0, self._retry_backoff_s
        while True:
            try:
                # The SDK's timeout is for silence, and never fires while an endpoint sends blanks.
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask(text)
            except openai.RateLimitError as error:
                asked_s = _retry_after_s(error)
                # an endpoint may ask for short waits for an hour
                least = min(max(MIN_WAIT_S, waited * WAIT_GROWTH), MAX_RETRY_BACKOFF_S)
                wait = pause if asked_s is None else max(asked_s, least)
                if error.code in _PERMANENT_CODES:
                    raise self._failed(error) from error
                if waited + wait > self._patience_s:
                    who = "the next wait is" if asked_s is None else "it asks to wait"
                    raise self._failed(
                        error,
                        f"; it was busy (429) for {waited:.4g} s, {who} {wait:.4g} s more, and "
                        f"patience_s={self._patience_s:g} is the limit per request: give a larger "
                        "patience_s, or go on later (resume=True)",
                    ) from error
                if wait >= LONG_WAIT_S or waited < LONG_WAIT_S <= waited + wait:
                    self._note(f"the {self._role} is busy (429): waiting {wait:.2g} s")
                waited += wait
            except (
                openai.APIConnectionError,
                openai.InternalServerError,
                json.JSONDecodeError,  # a truncated body
                TimeoutError,
            ) as error:
                tries += 1
                if tries == MAX_TRIES:
                    raise self._failed(error) from error
                wait = pause
            except openai.OpenAIError as error:
                raise self._failed(error) from error
            await sleep(wait)
            if wait == pause:  # not a wait that the endpoint asked for
                pause = min(2 * pause, MAX_RETRY_BACKOFF_S)

    async def _ask(self, text: str) -> Answer:
        messages: Any = [{"role": "user", "content": await self._content(text)}]
        reply = await self._client.chat.completions.create(
            model=self._llm.model, messages=messages, **self._llm.sampling
        )
        choices = getattr(reply, "choices", None)
        if not isinstance(choices, list) or not choices:  # endpoints may answer 200 with any body
            raise EngineError(f"{self._where} returned no choice: {str(reply)[:200]!r}")
        choice, usage = choices[0], reply.usage
        return Answer(
            text=clean_text(_text_of(getattr(choice, "message", None))),
            finish_reason=str(getattr(choice, "finish_reason", None)),
            input_tokens=_count(usage, "prompt_tokens"),
            output_tokens=_count(usage, "completion_tokens"),
        )

    async def _content(self, text: str) -> str | list[dict[str, Any]]:
        """Return the text, with the images that it refers to behind it."""
        digests = image_digests(text)[: self._max_images]
        found = await self._images(digests) if digests and self._images is not None else {}
        if not found:
            return text
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        for image in (found[digest] for digest in digests if digest in found):
            data = base64.b64encode(image.data).decode()
            url = f"data:{image.media_type};base64,{data}"
            content.append({"type": "text", "text": f"The image with the sha256 {image.digest}:"})
            content.append({"type": "image_url", "image_url": {"url": url}})
        return content

    @property
    def _where(self) -> str:
        return f"the {self._role} {self._llm.model} at {self._llm.base_url}"

    def _failed(self, error: Exception, remedy: str = "") -> EngineError:
        message = str(error) or f"no complete answer within {self._timeout_s} s"
        return EngineError(f"{self._where} failed: {type(error).__name__}: {message}{remedy}")


_DIGEST: Final = re.compile(r'"sha256": "([0-9a-f]{64})"')


def image_digests(text: str) -> list[str]:
    """Return the digests of the images to which a text refers (`schema.media`), each once."""
    references = (_DIGEST.search(match[0]) for match in IMAGE_REFERENCE.finditer(text))
    return list(dict.fromkeys(match[1] for match in references if match is not None))


def is_refusal(error: EngineError) -> bool:
    """Return whether an endpoint refused a request because of its content (status 400 or 422)."""
    import openai

    return isinstance(error.__cause__, openai.BadRequestError | openai.UnprocessableEntityError)


def _text_of(message: Any) -> str:
    """Return the text of an answer; empty if it has none.

    Some endpoints send a list of parts or no content, which the SDK's types do not allow.
    """
    content = getattr(message, "content", None) or getattr(message, "refusal", None)
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))


def _count(usage: Any, name: str) -> int:
    """Return a token count; 0 if the endpoint gives none."""
    count = getattr(usage, name, None)
    return count if isinstance(count, int) else 0


def _retry_after_s(error: openai.APIStatusError) -> float | None:
    """Return the `Retry-After` of a response in seconds; None if missing.

    The header has a number of seconds or an HTTP date.
    """
    for header, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(error.response.headers[header]) * unit)
        except (KeyError, ValueError):
            continue
    try:
        until = parsedate_to_datetime(error.response.headers["retry-after"])
        return max(0.0, (until - datetime.now(until.tzinfo)).total_seconds())
    except (KeyError, ValueError):
        return None
