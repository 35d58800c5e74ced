"""Generator of hostile requests: damaged valid requests of every dialect, and broken HTTP."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from lightspan.schema import semconv as c

Json = Any


@dataclass(frozen=True, slots=True)
class Hostile:
    """The bytes of one request."""

    kind: str
    data: bytes
    is_answered: bool = True
    """Whether HTTP allows an answer: the request is complete, or invalid before its end."""


# --- valid bodies ---------------------------------------------------------------------------
_SCHEMA: Final = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}
_FUNCTION: Final = {"name": "calculator", "description": "computes", "parameters": _SCHEMA}
_CALL: Final = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_USER: Final = {"role": "user", "content": "How many singers are there?"}
_CHAT: Final[dict[str, Json]] = {
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "33"},
        {"role": "user", "content": [{"type": "text", "text": "naïve café 🙂"}]},
    ],
    "max_tokens": 5,
    "n": 2,
    "logprobs": True,
    "stop": ["x", "yz"],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": "required",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    "chat_template_kwargs": {"enable_thinking": False},
    "stream_options": {"include_usage": True},
    "logit_bias": {"5": 1},
}
_COMPLETION: Final[dict[str, Json]] = {
    "prompt": ["SELECT", "12 +"],
    "max_tokens": 5,
    "n": 2,
    "logprobs": 0,
    "stop": "x",
    "best_of": 1,
}
_RESPONSE: Final[dict[str, Json]] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "12 + 7 * 3"}]},
        {"type": "function_call", "call_id": "f1", "name": "calculator", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "f1", "output": "33"},
    ],
    "max_output_tokens": 5,
    "instructions": "Be brief.",
    "tools": [{"type": "function", **_FUNCTION}],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
    "previous_response_id": "resp_call-1",
    "reasoning": {"effort": "low"},
}
_USE: Final = {"type": "tool_use", "id": "t1", "name": "calculator", "input": {"a": 1}}
_RESULT: Final = {"type": "tool_result", "tool_use_id": "t1", "content": "33"}
_MESSAGE: Final[dict[str, Json]] = {
    "messages": [
        _USER,
        {"role": "assistant", "content": [_USE]},
        {"role": "user", "content": [_RESULT]},
    ],
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief."}],
    "stop_sequences": ["x"],
    "tools": [{"name": "calculator", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "tool", "name": "calculator"},
    "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    "thinking": {"type": "enabled", "budget_tokens": 5},
}
_SAMPLING: Final = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 5, "stream": True}
_DIALECTS: Final[dict[str, tuple[dict[str, Json], set[str]]]] = {
    "chat/completions": (_CHAT, {"messages"}),
    "completions": (_COMPLETION, {"prompt"}),
    "responses": (_RESPONSE, {"input"}),
    "messages": (_MESSAGE, {"messages", "max_tokens"}),
    "messages/count_tokens": (_MESSAGE, {"messages", "max_tokens"}),
    "responses/input_tokens": (_RESPONSE, {"input"}),
}
"""Body and required fields of each dialect."""


def _valid(rng: random.Random, dialect: str) -> dict[str, Json]:
    """Return a body with some of the dialect's options."""
    whole, required = _DIALECTS[dialect]
    options = sorted({*whole, *_SAMPLING} - required)
    chosen = required | set(rng.sample(options, rng.randrange(0, 5)))
    body = {"model": rng.choice(["policy", "writer"]), **whole, **_SAMPLING}
    return copy.deepcopy({name: body[name] for name in sorted({"model", *chosen})})


# --- what is wrong with a body --------------------------------------------------------------
_ODD: Final[tuple[Json, ...]] = (
    *(None, True, -1, 0, 1.5, 1e308, 5e-324, 2**31, 2**64, -(2**63), 10**30, -(10**300)),
    *("", "\x00", "a\u2028b\ud7ff\uffff", "x" * 3_000, "🙂" * 50, "<|im_end|><|im_start|>system"),
    *("{{ 7 * 7 }}{% for x in range(10**9) %}{% endfor %}", [], {}, [[]], [None], {"": None}),
    *({"type": "text", "text": "a"}, {"type": "function", "function": {}}, [_USER] * 30),
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/nothing"}}},
    *({"pattern": "(a+)+$", "type": "string"}, list(range(300)), ["a"] * 300),
)


def _odd(rng: random.Random) -> Json:
    """Return an unexpected value."""
    value: Json = copy.deepcopy(rng.choice(_ODD))
    for _ in range(rng.randrange(300) if rng.random() < 0.03 else 0):
        value = [value]
    return value


def _places(value: Json) -> list[tuple[Json, Json]]:
    """Return (container, key) of every nested value."""
    entries: list[tuple[Json, Json]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        for key in range(len(one)) if isinstance(one, list) else list(one):
            entries.append((one, key))
            if isinstance(one[key], dict | list):
                waiting.append(one[key])
    return entries


def _mutate(body: dict[str, Json], rng: random.Random) -> None:
    """Damage one random part of `body` in place."""
    places = _places(body)
    if not places:
        return
    container, key = rng.choice(places)
    match rng.randrange(5):
        case 0:
            del container[key]
        case 1:
            container[key] = [container[key]]
        case 2 if isinstance(container, dict):
            container[rng.choice([*_SAMPLING, "type", "strict", "guided_json"])] = _odd(rng)
        case _:
            container[key] = _odd(rng)


_TOKENS: Final = (
    *(b"1e400", b"1" + b"0" * 5_000, b"NaN", b"-", b'"\\ud800"', b'"\xff\xfe"', b"[" * 3_000),
    *(b'{"a":1,"a":2}', b"'a'", b"[1,]", b"\x00", b'"\\x"', b"nul", b"", b"null", b"[]", b"1"),
)


def _spoil(data: bytes, rng: random.Random) -> bytes:
    """Return damaged or unusual JSON."""
    match rng.randrange(5):
        case 0:  # replace a value
            head, _, tail = data.partition(b":")
            return head + b":" + rng.choice(_TOKENS) + tail.lstrip(b' "0123456789.')
        case 1:
            return data[: rng.randrange(len(data) + 1)]
        case 2:
            return data.decode().encode("utf-16")
        case 3:
            return rng.choice(_TOKENS)
        case _:
            return rng.randbytes(rng.randrange(1, 200))


# --- what is wrong with a request -----------------------------------------------------------
_NAMES: Final = (
    *("Authorization", "Content-Type", "Content-Encoding", "Host", "Origin", "x-api-key"),
    *("x-stainless-retry-count", "Upgrade", c.HEADER_CALL_ID, c.HEADER_ATTEMPT),
    *(c.HEADER_AGENT, c.HEADER_PARENT, c.HEADER_PROTOCOL),
)
_VALUES: Final = (
    *(b"", b"\xff\xfe", b"a\tb", b"x" * 3_000, b"%00%ff%zz", b"../../x", b"*", b"-1", b"1e400"),
    *(b"Bearer \xff", b"gzip", b"br", b"http://evil.example", b"[::1", b"websocket"),
)
_PATHS: Final = (
    *("/", "//", "/v1/", "/v1/models/%ff%00", "/agents/%ff/v1/chat/completions", "*", "/%zz"),
    *("/agents//v1/messages", "/v1/%2e%2e/%2e%2e/etc/passwd", "http://other.example/v1/models"),
    "/agents/" + "x" * 3_000 + "/v1/completions",
)
_METHODS: Final = ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "FOO")
_POST: Final = b"POST /v1/messages HTTP/1.1\r\nHost: a\r\n"
_BROKEN: Final = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 400 + b"\r\n",
    _POST + b"Content-Length: -5\r\n\r\n",
    _POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    _POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabXX\r\n0\r\n\r\n",
)
"""Requests that are invalid before their end."""


def requests(seed: int, *, host: str, token: Callable[[], str]) -> Iterator[Hostile]:
    """Yield hostile requests for ever, the same for the same seed.

    Args:
        host: host and port.
        token: function that returns the valid token.
    """
    rng = random.Random(seed)
    while True:
        yield _one(rng, host, token())


def _one(rng: random.Random, host: str, token: str) -> Hostile:
    if rng.random() < 0.03:
        return Hostile("broken http", rng.choice(_BROKEN))
    dialect = rng.choice(sorted(_DIALECTS))
    body, kind = _valid(rng, dialect), "odd values"
    for _ in range(rng.randrange(0, 4)):
        _mutate(body, rng)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        data, kind = _spoil(data, rng), "no json"
    method, path = "POST", rng.choice([f"/v1/{dialect}", f"/agents/writer/v1/{dialect}"])
    headers = {"Host": host.encode(), "Authorization": f"Bearer {token}".encode()}
    if rng.random() < 0.3:
        headers[c.HEADER_CALL_ID] = f"call-{rng.randrange(50)}".encode()
    if rng.random() < 0.2:
        kind = "odd http"
        match rng.randrange(3):
            case 0:
                path = rng.choice(_PATHS)
            case 1:
                method = rng.choice(_METHODS)
            case _:
                headers[rng.choice(_NAMES)] = rng.choice(_VALUES)
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Content-Length: %d" % len(data)]
    lines += [name.encode() + b": " + value for name, value in headers.items()]
    wire = b"\r\n".join([*lines, b"", data])
    if rng.random() < 0.02:
        return Hostile("cut off", wire[: rng.randrange(len(wire))], is_answered=False)
    return Hostile(kind, wire)
