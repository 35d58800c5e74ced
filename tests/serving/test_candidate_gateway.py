"""Tests of the server of two sides in this process, with a scripted engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import lightspan
from lightspan.capture import sdk_instrumentation
from lightspan.errors import ConfigError, EngineError
from lightspan.schema import semconv as c
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.training.manifest import ServedPolicy, ServedRun
from lightspan_gateway import candidate_command
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.serving.candidate.access import (
    CandidateAccess,
    candidate_routing,
    counterparts,
)
from lightspan_gateway.serving.candidate.candidate import state_note
from lightspan_gateway.serving.candidate.client import assigned, status_of
from lightspan_gateway.serving.candidate.gateway import CandidateGateway
from lightspan_gateway.serving.candidate.sides import Side, side_of
from lightspan_gateway.serving.candidate.state import CandidateState, Decision, Weights
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_testing.gateway_suite import MESSAGES, shared_tokenizer
from lightspan_testing.scripted_engine import Say, ScriptedEngine
from tests.serving.gateways import says_who, serving as plain_serving

OLD, NEW = Weights("old", "0" * 12), Weights("new", "1" * 12)


def run_of(**agents: str) -> ServedRun:
    """Return the description of a run; `agents` is agent → policy."""
    rules = [
        Rule(agent, Target(route=Route.POLICY, policy=policy)) for agent, policy in agents.items()
    ]
    return ServedRun(
        policies={
            policy: ServedPolicy(folder=policy, model="base")
            for policy in dict.fromkeys(agents.values())
        },
        base_model="base",
        routing=Routing(rules=rules, default=Target(route=Route.BASE, policy="base")),
    )


TWO = run_of(writer="sql", planner="plan")


@asynccontextmanager
async def serving(
    folder: Path, share: float = 0.5, admin: str | None = None, script: Any = says_who
) -> AsyncIterator[CandidateGateway]:
    state = CandidateState(folder / "candidate.db")
    state.begin(OLD, NEW, share)
    admin_key = None if admin is None else Keys({Role.ADMIN: admin})
    policies = {"sql": 1, "plan": 1, "base": 0, "candidate/sql": 2, "candidate/plan": 2}
    engine = ScriptedEngine(shared_tokenizer(), script, policies=policies)
    access = CandidateAccess(
        TWO,
        candidate_routing(TWO, policies, "base"),
        {name: f"candidate/{name}" for name in counterparts(TWO, TWO)},
        state,
    )
    async with CandidateGateway(engine, access, admin=admin_key) as gateway:
        yield gateway


async def ask(
    gateway: CandidateGateway, attempt: str | None, path: str = "/v1", **fields: Any
) -> tuple[str, str]:
    """Return the answer and the name of its model."""
    headers = {} if attempt is None else {c.HEADER_ATTEMPT: attempt}
    async with openai.AsyncOpenAI(
        base_url=gateway.url + path, api_key="-", max_retries=0
    ) as client:
        body = {"model": "sql", "messages": MESSAGES, "extra_headers": headers, **fields}
        answer = await client.chat.completions.create(**body)
    return str(answer.choices[0].message.content), answer.model


async def request(
    gateway: CandidateGateway, method: str, path: str, key: str = "", **fields: Any
) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.request(
            method, f"{gateway.url}/lightspan/candidate{path}", json=fields or None
        ) as response,
    ):
        return response.status, await response.json()


@pytest.mark.asyncio
async def test_all_agents_of_an_attempt_are_on_its_side(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        comparison = gateway._candidate_access.comparison
        sides = set()
        for number in range(40):
            attempt = f"at-{number}"
            side = side_of(f"attempt {attempt}", comparison.salt, 0.5)
            start, digest = (
                ("candidate/", NEW.digest) if side is Side.CANDIDATE else ("", OLD.digest)
            )
            mark = f"@{digest}+{side}.{comparison.comparison_id}"
            assert [
                await ask(gateway, attempt, "/agents/writer/v1"),
                await ask(gateway, attempt, "/agents/planner/v1"),
                await ask(gateway, attempt, model="planner"),
                await ask(gateway, attempt, model="plan"),
                await ask(gateway, attempt, "/agents/other/v1"),
                await ask(gateway, attempt, model="base"),
            ] == [
                (f"I am {start}sql", f"sql{mark}"),
                *[(f"I am {start}plan", f"plan{mark}")] * 3,
                *[("I am base", f"base{mark}")] * 2,
            ]
            sides.add(side)
        assert sides == {*Side}
        counts = (await request(gateway, "GET", ""))[1]["begun"]
        assert sum(counts.values()) == 40


@pytest.mark.asyncio
async def test_a_trace_is_an_attempt(tmp_path: Path) -> None:
    async with serving(tmp_path) as gateway:
        models = set()
        for number in range(20):
            headers = {c.HEADER_PARENT: f"00-{number + 1:032x}-{7:016x}-01"}
            answers = {(await ask(gateway, None, extra_headers=headers))[1] for _ in range(3)}
            assert len(answers) == 1
            models |= answers
        assert len(models) == 2


@pytest.mark.asyncio
async def test_a_failing_state_fails_no_call_and_compares_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as gateway:
        await ask(gateway, "before")
        with sqlite3.connect(tmp_path / "candidate.db") as file:
            file.execute("DROP TABLE assignments")
        file.close()
        with caplog.at_level(logging.WARNING):
            answers = [await ask(gateway, f"at-{number}") for number in range(5)]
        assert answers == [("I am sql", f"sql@{OLD.digest}")] * 5
        assert gateway._candidate_access.state_errors == 10  # to assign and to remember
        [warning] = [
            r for r in caplog.records if "are answered without being compared" in r.message
        ]
        assert "no such table: assignments" in warning.message
        assert (await request(gateway, "GET", ""))[1]["state_errors"] == 10


@pytest.mark.asyncio
async def test_keys_and_decisions(tmp_path: Path) -> None:
    admin, caller = "a" * 40, "c" * 40
    async with serving(tmp_path, admin=admin) as gateway:
        status, body = await request(gateway, "GET", "", caller)
        assert (status, body["comparison"]["salt"], body["comparison"]["decision"]) == (
            200,
            "",
            None,
        )
        right = {"comparison_id": body["comparison"]["comparison_id"]}
        assert (await request(gateway, "POST", "/promote", caller, **right))[0] == 403
        assert (await request(gateway, "POST", "/delete", admin, **right))[0] == 404
        assert (await request(gateway, "POST", "/promote", admin, comparison_id=3))[0] == 400
        assert (await request(gateway, "POST", "/promote", admin, comparison_id="0"))[0] == 409
        assert (await ask(gateway, "1"))[1].endswith(right["comparison_id"])
        status, body = await request(gateway, "POST", "/promote", admin, **right)
        assert (status, body["comparison"]["decision"]) == (200, "promoted")
        assert await ask(gateway, "2") == ("I am candidate/sql", f"sql@{NEW.digest}")
        status, body = await request(gateway, "POST", "/roll-back", admin, **right, reason="slow")
        assert (body["comparison"]["decision"], body["comparison"]["reason"]) == (
            "rolled back",
            "slow",
        )
        assert await ask(gateway, "3") == ("I am sql", f"sql@{OLD.digest}")
        assert await ask(gateway, "2") == ("I am candidate/sql", f"sql@{NEW.digest}")


@pytest.mark.asyncio
async def test_the_server_names_the_weights_of_attempts(tmp_path: Path) -> None:
    admin = "a" * 40
    async with serving(tmp_path, admin=admin) as gateway:
        marks = {f"attempt {n}": (await ask(gateway, str(n)))[1] for n in range(24)}
        comparison_id = gateway._candidate_access.comparison.comparison_id
        keys = [*marks, "attempt of nobody"]
        digests = await asyncio.to_thread(assigned, gateway.url, comparison_id, keys, admin)
        assert digests == {key: mark.split("@")[1][:12] for key, mark in marks.items()}
        assert set(digests.values()) == {OLD.digest, NEW.digest}
        status, _ = await request(gateway, "POST", "/attempts", admin, keys="all")
        assert status == 400


@pytest.mark.asyncio
async def test_a_server_without_a_candidate_is_named() -> None:
    async with plain_serving() as gateway:
        with pytest.raises(ConfigError, match=r"is no `lightspan serve --candidate`: it serves no"):
            await asyncio.to_thread(status_of, gateway.url)


@pytest.mark.asyncio
async def test_a_redirect_does_not_get_the_key() -> None:
    """Another server, to which the candidate's redirects, could read the key."""
    requests: list[web.Request] = []

    async def other(request: web.Request) -> web.Response:
        requests.append(request)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", other)
    async with TestServer(app) as server:
        with pytest.raises(ConfigError, match="refuses: HTTP 307"):
            await asyncio.to_thread(status_of, str(server.make_url("")), "a" * 40)
    assert [request.path for request in requests] == ["/lightspan/candidate"]


def candidate_fails(request: Any) -> Say:
    is_candidate = request.policy.startswith("candidate/")
    return Say(text="good", errors={0: EngineError("out of memory")} if is_candidate else {})


def run_app(url: str, *, handles: bool) -> None:
    """Run an app whose call may fail, which it handles or not, as a recorded attempt."""
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
        lightspan.agent("writer"),
    ):
        try:
            client.chat.completions.create(model="sql", messages=MESSAGES)
        except openai.APIError:
            if not handles:
                raise


@pytest.mark.asyncio
@pytest.mark.parametrize("handles", [True, False])
async def test_a_recorded_app_whose_candidate_fails_is_compared(
    tmp_path: Path, handles: bool
) -> None:
    store = f"sqlite:{tmp_path / 'production.db'}"

    def record(url: str) -> None:
        with lightspan.record(store) as recording:
            with lightspan.connect(url):
                for _ in range(30):
                    with contextlib.suppress(openai.APIError):
                        run_app(url, handles=handles)
            assert recording.flush()

    def command(*arguments: str) -> Any:
        parser = argparse.ArgumentParser()
        candidate_command.add(parser.add_subparsers())
        options = parser.parse_args(["candidate", *arguments, "--store", store])
        return options.run(options)

    try:
        async with serving(tmp_path, script=candidate_fails) as gateway:
            await asyncio.to_thread(record, gateway.url)
            for target in (gateway.url, str(tmp_path)):
                shown = json.loads(await asyncio.to_thread(command, "status", target, "--json"))
                begun, sides = shown["server"]["begun"], shown["result"]["sides"]
                assert [sides[name]["attempts"] for name in ("current", "candidate")] == [
                    begun[OLD.digest],
                    begun[NEW.digest],
                ]
                assert [sides[name]["failed"] for name in ("current", "candidate")] == [
                    0,
                    begun[NEW.digest],
                ]
                with pytest.raises(ConfigError, match="not promoted: the candidate is worse"):
                    await asyncio.to_thread(command, "promote", target)
    finally:
        sdk_instrumentation.uninstall()
        sdk_instrumentation.close()


def test_what_a_candidate_must_answer() -> None:
    with pytest.raises(ConfigError, match="has no policy 'plan', which apps may name: it has sql"):
        counterparts(TWO, run_of(writer="sql", planner="sql"))
    assert counterparts(run_of(writer="a"), run_of(writer="b")) == {"a": "b"}
    missing = ServedRun(policies=TWO.policies, base_model="base", routing=Routing())
    with pytest.raises(ConfigError, match="does not answer the calls of 'writer'"):
        counterparts(TWO, missing)


def test_other_starting_weights_have_a_policy_of_their_own() -> None:
    routing = candidate_routing(TWO, {"candidate/sql", "candidate/plan"}, "candidate/base")
    target = routing.target("other")
    assert (target.route, target.policy) == (Route.SHARED, "candidate/base")


@pytest.mark.parametrize(
    ("decision", "note"),
    [
        (None, "the comparison with new pauses: it needs --candidate new"),
        (Decision.PROMOTED, "new was promoted in place of"),
        (Decision.ROLLED_BACK, ""),
    ],
)
def test_a_run_that_is_served_without_its_candidate_says_so(
    tmp_path: Path, decision: Decision | None, note: str
) -> None:
    assert not state_note(tmp_path)
    state = CandidateState(tmp_path / "candidate.db")
    state.begin(OLD, NEW, 0.5)
    if decision is not None:
        state.decide(decision)
    state.close()
    assert state_note(tmp_path).startswith(note)
    assert bool(state_note(tmp_path)) == bool(note)
