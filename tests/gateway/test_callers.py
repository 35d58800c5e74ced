"""Tests of callers without lightspan's headers: authentication, agents and retries."""

from __future__ import annotations

import pytest

from lightspan.errors import StoreError
from lightspan.schema import semconv as c
from lightspan.schema.resources import NamedResources
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.protocol import Store
from lightspan_testing.gateway_suite import POLICY, make_rig
from tests.gateway.posting import ask, error, post


@pytest.mark.parametrize(
    ("path", "agent"),
    [
        ("/agents/writer/v1", "writer"),
        ("/agents/team/writer/v1", "team/writer"),
        ("/agents/a%2Fb/c%25d%20e/v1", "a%2Fb/c%25d e"),
        ("/agents/v1/v1", "v1"),
    ],
)
async def test_the_url_names_the_agent(store: Store, path: str, agent: str) -> None:
    async with make_rig(store, "ok") as rig:
        assert (await post(rig, ask(model="x"), f"{path}/chat/completions"))[0] == 200
        [span] = await rig.spans()
        assert span.attributes[c.AGENT_PATH] == agent


@pytest.mark.parametrize(("model", "agent"), [("writer", "writer"), ("team/x", "team/x")])
async def test_the_model_names_the_agent(store: Store, model: str, agent: str) -> None:
    routing = Routing(rules=[Rule("writer", POLICY), Rule("team/*", POLICY)])
    async with make_rig(store, "ok", routing=routing) as rig:
        assert (await post(rig, ask(model=model)))[0] == 200
        [span] = await rig.spans()
        assert span.attributes[c.AGENT_PATH] == agent


async def test_an_unknown_model(store: Store) -> None:
    async with make_rig(store, "ok", routing=Routing(rules=[Rule("writer", POLICY)])) as rig:
        message = "unknown model 'gpt-9': use the name of a policy or agent (policy, writer)"
        refused = (404, error(message, param="model", code="model_not_found"))
        assert await post(rig, ask(model="gpt-9")) == refused
        served = "no policy 'q' is served here (there is policy)"
        unserved = Routing(default=Target(route=Route.POLICY, policy="q"))
        rig.attempt = await rig.claim(unserved)
        refused = (404, error(served, param="model", code="model_not_found"))
        assert await post(rig, ask(model="any")) == refused


@pytest.mark.parametrize("pattern", ["*", "**"])
async def test_any_model_name_does_where_every_agent_is_served(store: Store, pattern: str) -> None:
    routing = Routing(rules=[Rule(pattern, POLICY)])
    async with make_rig(store, "ok", routing=routing) as rig:
        assert (await post(rig, ask(model="gpt-9")))[0] == 200
        [span] = await rig.spans()
        assert span.attributes[c.AGENT_PATH] == "app"


async def test_starting_weights_and_moving_weights(store: Store) -> None:
    routing = Routing(
        rules=[
            Rule("a", Target(route=Route.BASE, policy="base")),
            Rule("b", Target(route=Route.SHARED, policy="policy")),
        ]
    )
    async with make_rig(store, "ok", routing=routing, policies={"base": 1, "policy": 4}) as rig:
        for agent in "ab":
            assert (await post(rig, ask(), **{c.HEADER_AGENT: agent}))[0] == 200
        versions = [(r.policy, r.versions) for r in await rig.records()]
        assert versions == [("base", [(1, 3)]), ("policy", [(4, 3)])]
        assert [span.attributes[c.SELECTED] for span in await rig.spans()] == [False, False]


async def test_of_equal_calls_at_once_the_one_without_a_client_is_retried(store: Store) -> None:
    async with make_rig(store, ["one", "two"]) as rig:
        calls = [await post(rig, ask()), await post(rig, ask())]
        first, second = rig.session().calls.values()
        first.delivered = second.delivered = False
        second.subscribe()  # the client is still connected
        _, again = await post(rig, ask(), **{"x-stainless-retry-count": "1"})
        assert again["id"] == calls[0][1]["id"]
        second.unsubscribe()


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_sdk_retry_without_the_shim(store: Store, restarted: bool) -> None:
    """Check that a retry with `x-stainless-retry-count` gets the answer that was not delivered."""
    async with make_rig(store, ["one", "two", "three"]) as rig:
        _, first = await post(rig, ask())
        [call] = rig.session().calls.values()
        call.delivered = False  # as if the answer was not delivered
        if restarted:
            await rig.restart()
        _, again = await post(rig, ask(), **{"x-stainless-retry-count": "1"})
        assert {**again, "created": 0} == {**first, "created": 0}
        _, other = await post(rig, ask())  # an equal body that is no retry is another call
        assert other["choices"][0]["message"]["content"] == "two"
        _, another = await post(rig, ask(n=1), **{"x-stainless-retry-count": "1"})
        assert another["choices"][0]["message"]["content"] == "three"
        outcomes = [span.attributes[c.CALL_OUTCOME] for span in await rig.spans()]
        assert outcomes == [CallOutcome.OK] * 3


async def test_attempts_with_the_same_resources_read_them_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    original = store.get_resources

    async def get_resources(resources_id: str) -> NamedResources:
        asked.append(resources_id)
        return await original(resources_id)

    monkeypatch.setattr(store, "get_resources", get_resources)
    routings = [Routing(rules=[Rule(name, POLICY)]) for name in ("writer", "writer", "editor")]
    async with make_rig(store, "ok") as rig:
        for routing in routings:
            rig.attempt = await rig.claim(routing)
            agents = [rule.pattern for rule in routing.rules]
            assert [(await post(rig, ask(model=agent)))[0] for agent in agents] == [200]
            assert (await post(rig, ask(model="other")))[0] == 404
    assert len(asked) == len(set(asked)) == 2


async def test_resources_that_cannot_be_read_are_read_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failures = store.get_resources, [StoreError("the disk is full")]

    async def get_resources(resources_id: str) -> NamedResources:
        if failures:
            raise failures.pop()
        return await original(resources_id)

    monkeypatch.setattr(store, "get_resources", get_resources)
    async with make_rig(store, "ok", routing=Routing(rules=[Rule("writer", POLICY)])) as rig:
        assert [(await post(rig, ask(model="writer")))[0] for _ in range(2)] == [503, 200]
