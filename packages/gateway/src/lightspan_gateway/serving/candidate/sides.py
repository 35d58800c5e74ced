"""Pure rules of a comparison: the side of an attempt, what identifies it, and names of weights.

The side is a function of the comparison's salt and share and of a key. The calls of one attempt
have the same key, so neither a restart nor the order of calls changes the side.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.schema import semconv as c
from lightspan.schema.genai_attributes import request_attributes
from lightspan.schema.genai_messages import input_messages_of
from lightspan.training.manifest import ServedRun
from lightspan_gateway.calls import TRACEPARENT

DIGEST_LENGTH: Final = 12
"""Number of hexadecimal digits of the digest that identifies weights."""
MAX_TURNS: Final = 64
"""Maximum number of a conversation's answers, counted from the last, that are looked up."""
_WEIGHT_FILES: Final = ("*.safetensors", "*.json", "*.jinja", "*.model")
_MARK: Final = re.compile(
    r"(?P<policy>.+)@(?P<digest>[0-9a-f]{12})"
    r"(?:\+(?P<side>current|candidate)\.(?P<comparison>[0-9a-f]{8}))?"
)


class Side(StrEnum):
    """The weights that answer an attempt."""

    CURRENT = "current"
    CANDIDATE = "candidate"


def side_of(key: str, salt: str, share: float) -> Side:
    """Return the side of an attempt.

    A larger share moves attempts to the candidate's side only, none back.

    Args:
        key: what identifies the attempt (`attempt_key`, `user_key`).
        salt: random text of the comparison.
        share: share of attempts that the candidate answers, from 0 to 1.
    """
    digest = hashlib.sha256(f"{salt}\0{key}".encode(errors="surrogatepass")).digest()
    return Side.CANDIDATE if int.from_bytes(digest[:8]) < share * 2**64 else Side.CURRENT


# --- requests -------------------------------------------------------------------------------
def attempt_key(headers: Mapping[str, str]) -> str | None:
    """Return what identifies the attempt of a request; None if the client sends nothing.

    It is the attempt's id (`x-lightspan-attempt`), or else the trace id of `traceparent`. A trace
    id of zeros is invalid: programs without tracing send it, and all of their calls would be one
    attempt.
    """
    if attempt_id := headers.get(c.HEADER_ATTEMPT):
        return key_of_attempt(attempt_id)
    trace = TRACEPARENT.fullmatch(headers.get(c.HEADER_PARENT, ""))
    return key_of_trace(trace[1]) if trace and trace[1].strip("0") else None


def key_of_attempt(attempt_id: str) -> str:
    """Return the key of an attempt whose calls carry its id."""
    return f"attempt {attempt_id}"


def key_of_trace(trace_id: str) -> str:
    """Return the key of an attempt whose calls carry a trace id of 32 hexadecimal digits."""
    return f"trace {trace_id}"


def user_key(body: Mapping[str, Any]) -> str | None:
    """Return the user in a request's body; None if it names none.

    The fields are `safety_identifier` and `user` of OpenAI, and `metadata.user_id` of Anthropic.
    """
    metadata = body.get("metadata")
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    users = (body.get("safety_identifier"), body.get("user"), user_id)
    return next((f"user {user}" for user in users if isinstance(user, str) and user), None)


def conversation_keys(body: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return a key for each conversation that ends with one of `answers`.

    Args:
        body: body of the answered request.
        answers: its answers, as OpenAI messages.
    """
    before = [b"", *_chain(_messages(body))][-1]
    return [next(_chain([answer], before)) for answer in answers]


def earlier_keys(body: Mapping[str, Any]) -> list[bytes]:
    """Return the keys of the answered conversations that a request may continue.

    The longest conversation comes first. The result is empty if the request has no earlier answer.
    """
    messages = _messages(body)
    chain = zip(messages, _chain(messages), strict=True)
    keys = [key for message, key in chain if message.get("role") == "assistant"]
    return keys[: -MAX_TURNS - 1 : -1]


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a request of any API as OpenAI messages, without instructions.

    Instructions are left out because apps change them from turn to turn. A request that cannot be
    read has no messages; it is refused later.
    """
    try:
        messages = input_messages_of(request_attributes(body))
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return [message for message in messages if message.get("role") != "system"]


def _chain(messages: Sequence[Mapping[str, Any]], before: bytes = b"") -> Iterator[bytes]:
    """Yield for each message a hash of it and of all messages before it."""
    for message in messages:
        content = message.get("content")
        text = content.strip() if isinstance(content, str) else content or ""
        calls = [
            [call["function"].get("name"), _arguments(call["function"].get("arguments"))]
            for call in message.get("tool_calls") or []
        ]
        encoded = msgspec.json.encode([message.get("role"), text, calls], order="deterministic")
        before = hashlib.sha256(before + encoded).digest()[:16]
        yield before


def _arguments(value: Any) -> Any:
    """Return a tool call's arguments without the differences of spelling that clients introduce."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


# --- weights --------------------------------------------------------------------------------
class Mark(NamedTuple):
    """The name of a model in the answers of a comparison, in parts."""

    policy: str
    digest: str
    side: Side | None
    """None if the attempt began after the decision."""
    comparison_id: str
    """Empty if `side` is None."""

    def __str__(self) -> str:
        side = "" if self.side is None else f"+{self.side}.{self.comparison_id}"
        return f"{self.policy}@{self.digest}{side}"


def read_mark(model: object) -> Mark | None:
    """Return the parts of a model's name in an answer; None if it is no such name."""
    match = _MARK.fullmatch(model) if isinstance(model, str) else None
    if match is None:
        return None
    side = None if match["side"] is None else Side(match["side"])
    return Mark(match["policy"], match["digest"], side, match["comparison"] or "")


def weights_digest(served: ServedRun, folder: Path) -> str:
    """Return a digest of everything by which a run or model answers.

    These are the files of weights, tokenizers and settings of all policies, the starting weights'
    names, and the routing.

    Args:
        served: description of the run or model.
        folder: its folder.
    """
    digest = hashlib.sha256(msgspec.json.encode(served.routing, order="deterministic"))
    digest.update(served.base_model.encode())
    for name, policy in sorted(served.policies.items()):
        digest.update(f"{name}\0{policy.model}\0".encode())
        weights = folder / policy.folder
        for path in sorted(path for glob in _WEIGHT_FILES for path in weights.glob(glob)):
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:DIGEST_LENGTH]
