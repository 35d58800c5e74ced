"""A serving gateway with a scripted engine, and requests to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai

from lightspan.protocols.engine import GenerationRequest
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan_gateway.calls import ServedCall
from lightspan_gateway.serving.public_access import (
    ServingGateway,
)
from lightspan_testing.gateway_suite import MESSAGES, shared_tokenizer
from lightspan_testing.scripted_engine import ScriptedEngine

ROUTING = Routing(
    rules=[
        Rule("writer", Target(route=Route.POLICY, policy="sql")),
        Rule("planner", Target(route=Route.POLICY, policy="plan")),
        Rule("checker", Target(route=Route.BASE, policy="base")),
        Rule("judge*", Target(route=Route.SHARED, policy="sql")),
    ]
)


def says_who(request: Any) -> str:
    return f"I am {request.policy}"


def make_engine(script: Any = says_who) -> ScriptedEngine:
    policies = {"sql": 4, "plan": 2, "base": 0}
    return ScriptedEngine(shared_tokenizer(), script, policies=policies)


@asynccontextmanager
async def serving(script: Any = says_who, **options: Any) -> AsyncIterator[ServingGateway]:
    gateway = ServingGateway(make_engine(script), options.pop("routing", ROUTING), **options)
    async with gateway:
        yield gateway


def calls_of(gateway: ServingGateway) -> list[ServedCall]:
    [session] = gateway.access.sessions()
    return list(session.calls.values())


def input_messages_of(gateway: ServingGateway) -> list[GenerationRequest]:
    engine = gateway._handler._engine
    assert isinstance(engine, ScriptedEngine)
    return engine.requests


def client_of(gateway: ServingGateway, path: str = "/v1", **options: Any) -> openai.AsyncOpenAI:
    defaults = {"base_url": gateway.url + path, "api_key": "unused", "max_retries": 0}
    return openai.AsyncOpenAI(**{**defaults, **options})


async def ask(gateway: ServingGateway, path: str = "/v1", **fields: Any) -> str:
    async with client_of(gateway, path) as client:
        body = {"model": "sql", "messages": MESSAGES, **fields}
        answer = await client.chat.completions.create(**body)
        return str(answer.choices[0].message.content)


async def get(gateway: ServingGateway, path: str, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(gateway.url + path, headers=headers) as response,
    ):
        return response.status, json.loads(await response.read())
