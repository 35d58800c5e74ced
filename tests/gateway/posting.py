"""Send raw requests to a gateway."""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp

from lightspan_testing.gateway_suite import MESSAGES, Rig


async def post(rig: Rig, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Any:
    """Send a raw request with the attempt's token; return (status, decoded body)."""
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    sent = {"Authorization": f"Bearer {rig.attempt.call_token}", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.post(rig.gateway.url + path, data=data, headers=sent) as response,
    ):
        return response.status, json.loads(await response.read())


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": MESSAGES, **fields}


def error(message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
