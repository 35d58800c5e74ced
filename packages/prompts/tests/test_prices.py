"""Tests of cost budgets: counting, ending a search, refusals."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from lightspan import Price
from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.errors import ConfigError
from lightspan.lightning.episode import Episode, build_episode
from lightspan.schema.genai_messages import dump
from lightspan_prompts.search.feedback import evidence_of
from lightspan_testing.scripted import Reply, ScriptedServer
from lightspan_testing.strategies import make_attempt, make_rollout
from packages.prompts.tests.made_up import TASKS, World, apo, call, gepa, pool, reflects, search

PRICES = {"thinker": Price(input=2000.0, output=10_000.0), "small": Price(input=50.0, output=500.0)}


def reflections(folder: Path) -> list[dict[str, Any]]:
    """Return the reflections of GEPA's journal."""
    lines = (folder / "journal/gepa.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["type"] == "reflection"]


async def test_money_is_counted(server: ScriptedServer, tmp_path: Path) -> None:
    """Both calls of the app and each reflection count.

    The tokens of a call with two choices count once.
    """
    app = [call(1, "small", 90, 10), call(1, "small", 90, 10, choice=1), call(2, "small", 20, 2)]
    world = World(tmp_path, calls=app)
    result = await search(gepa(server, max_cost=1.5, prices=PRICES), world)
    entries = reflections(tmp_path)
    assert {entry["model"] for entry in entries} == {"thinker"}
    asked, answered = (
        sum(entry[name] for entry in entries) for name in ("input_tokens", "output_tokens")
    )
    rollouts = result.rollouts * (110 * 50.0 + 12 * 500.0) / 1e6
    cost = rollouts + (asked * 2000.0 + answered * 10_000.0) / 1e6
    assert asked > answered > 0
    assert result.cost == pytest.approx(cost, rel=1e-12)
    assert 1.5 <= result.cost < 3
    assert result.ended == f"max_cost=1.5 is used up: {result.cost:.4g}"
    assert result.metrics()["cost"] == result.cost
    assert (
        f"this cost {result.cost:.4g}, by prices=, without the app's calls for embeddings, which "
        "are not counted"
    ) in result.notes()
    assert not any(each.again for each in result.candidates)


async def test_a_dry_run_says_what_a_search_would_cost(
    server: ScriptedServer, tmp_path: Path
) -> None:
    calls = [call(1, "small", 90, 10), call(2, "large", 20, 2)]
    world = World(tmp_path, lambda task, texts: 1.0, calls=calls)
    episodes = await world.rollouts(TASKS[:2], 1, resources=[{}, {}])
    asked = "questions to the reflection model come on top of the calls"
    assert gepa(server).inspect_episodes(episodes) == [f"at most 50 {asked}"]
    assert gepa(server, max_reflections=7).inspect_episodes(episodes) == [f"at most 7 {asked}"]
    assert apo(server).inspect_episodes(episodes) == [f"at most 24 {asked}"]
    cost = 150 * (90 * 50.0 + 10 * 500.0) / 1e6
    assert gepa(server, prices=PRICES).inspect_episodes(episodes) == [
        f"at most 50 {asked}; by prices= the app's calls in max_rollouts=150 would cost about "
        f"{cost:.4g} (prices= has none for 'large')"
    ]


async def test_a_missing_price_ends_the_search(server: ScriptedServer, tmp_path: Path) -> None:
    app = [call(1, "large", 90, 10)]
    world = World(tmp_path, calls=app)
    with pytest.raises(ConfigError, match=r"'large' was called: add prices=.*resume=True"):
        await search(gepa(server, max_cost=0.9, prices=PRICES), world)
    assert (world.rollouts_done, len(server.requests)) == (5, 0)
    prices = {**PRICES, "large": Price(input=1.0, output=1.0)}
    again = World(tmp_path, calls=app)
    result = await search(gepa(server, max_cost=0.9, prices=prices), again)
    assert again.rollouts_done == result.rollouts - 5
    whole = await search(
        gepa(server, max_cost=0.9, prices=prices), World(tmp_path / "other", calls=app)
    )
    assert (pool(whole), whole.cost) == (pool(result), result.cost)


async def test_a_cost_is_reported_without_a_cap(server: ScriptedServer, tmp_path: Path) -> None:
    """A model without a price is named, and ends nothing."""
    app = [call(1, "small", 90, 10), call(2, "large", 20, 2)]
    world = World(tmp_path, calls=app)
    result = await search(gepa(server, prices=PRICES, max_rollouts=40), world)
    asked, answered = result.usage["thinker"]
    rollouts = result.rollouts * (90 * 50.0 + 10 * 500.0) / 1e6
    cost = rollouts + (asked * 2000.0 + answered * 10_000.0) / 1e6
    assert result.cost == pytest.approx(cost, rel=1e-12)
    assert result.usage["large"] == (20 * result.rollouts, 2 * result.rollouts)
    assert "prices= has no price for 'large', so the cost is without them" in world.notes
    assert any(note.startswith("tokens: small ") for note in world.notes)
    plain = await search(gepa(server, max_rollouts=40), World(tmp_path / "plain", calls=app))
    assert (plain.cost, plain.usage) == (None, result.usage)


async def test_a_stream_without_usage_is_estimated(tmp_path: Path) -> None:
    """A streaming app would be free otherwise; its calls are recorded with their text alone."""
    scope = AttemptContext(rollout_id="ro-1", attempt_id="at-1")
    told = "You answer in German, in full sentences, and never with a list." * 10
    with (
        ScriptedServer("Sehr gerne, das ist eine Antwort in ganzen Sätzen. " * 10) as model,
        openai.OpenAI(base_url=model.url, api_key="key", max_retries=0) as client,
        open_scope(scope),
    ):
        for options in ({}, {"stream_options": {"include_usage": True}}):
            create: Any = client.chat.completions.create
            stream = create(
                model="small",
                messages=[{"role": "system", "content": told}],
                stream=True,
                **options,
            )
            for _ in stream:
                pass
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()
    spans = scope.recorder.drain()
    attempt, rollout = make_attempt("1", reward=1.0), make_rollout("1")
    one, two = (build_episode(attempt, rollout, [span], []) for span in spans)
    silent, counted = evidence_of(one, None), evidence_of(two, None)
    assert (silent.estimated, counted.estimated) == (1, 0)
    assert silent.usage is not None
    [(sent, received)] = silent.usage.values()
    answer = "Sehr gerne, das ist eine Antwort in ganzen Sätzen. " * 10
    assert (sent, received) == (-(-len(told) // 4), -(-len(answer.encode()) // 4))
    assert counted.tokens > 0


async def test_calls_that_nobody_waited_for_are_estimated(tmp_path: Path) -> None:
    """Their text was sent, and the endpoint may charge an answer of `max_tokens`."""
    scope = AttemptContext(rollout_id="ro-1", attempt_id="at-1")
    asked: Any = [{"role": "user", "content": "12345678"}]
    late = Reply(text="too late", delay_s=0.5)
    with ScriptedServer(lambda request: late) as model, open_scope(scope):
        client = openai.AsyncOpenAI(base_url=model.url, api_key="key", max_retries=0)
        create: Any = client.chat.completions.create
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                create(model="small", messages=asked, max_completion_tokens=50), 0.1
            )
        with pytest.raises(openai.APITimeoutError):
            await create(model="small", messages=asked, timeout=0.1)
        refused = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="key", max_retries=0)
        with pytest.raises(openai.APIConnectionError):
            await refused.chat.completions.create(model="small", messages=asked)
        await client.close()
        await refused.close()
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()
    episode = build_episode(
        make_attempt("1", reward=1.0), make_rollout("1"), scope.recorder.drain(), []
    )
    evidence = evidence_of(episode, None)
    assert len(episode.calls) == 3
    assert (evidence.unanswered, evidence.estimated) == (2, 0)
    assert evidence.usage == {"small": (4, 50)}


async def test_a_budget_bounds_calls_without_an_answer(
    server: ScriptedServer, tmp_path: Path
) -> None:
    lost = call(1, "small", 0, 0)
    assert lost.span is not None
    asked = dump([{"role": "user", "content": "1234"}])
    lost.span.attributes.update(
        {
            "lightspan.call.outcome": "cancelled",
            "gen_ai.input.messages": asked,
            "gen_ai.request.max_tokens": 999,
        }
    )
    options = {"max_tokens": 20_000, "max_reflections": 9}
    result = await search(gepa(server, **options), World(tmp_path, calls=[lost]))
    assert result.ended.startswith("max_tokens=20000 is used up")
    assert result.usage["small"] == (result.rollouts, 999 * result.rollouts)
    assert result.unanswered == result.rollouts
    assert any(
        note.startswith(f"{result.rollouts} model calls of the app had no answer in time")
        for note in result.notes()
    )


async def test_repeated_attempts_are_paid_for(server: ScriptedServer, tmp_path: Path) -> None:
    """Each attempt that an error of the endpoint ended has made its calls before."""

    class Repeating(World):
        async def rollouts(self, *args: Any, **options: Any) -> list[Episode]:
            episodes = await super().rollouts(*args, **options)
            lost = replace(episodes[0], attempt_id="at-lost", reward=None)
            return [replace(episodes[0], earlier=(lost, lost)), *episodes[1:]]

    world = Repeating(tmp_path, calls=[call(1, "small", 90, 10)])
    result = await search(gepa(server, max_rollouts=40, max_cost=99.0, prices=PRICES), world)
    assert result.repeated == 2 * len(world.batches)
    paid = result.rollouts + len(world.batches)  # both lost attempts have the same id
    assert result.usage["small"] == (90 * paid, 10 * paid)
    assert any(
        note.startswith(f"{result.repeated} attempts came to nothing") for note in result.notes()
    )


def test_an_estimate_is_of_texts_alone() -> None:
    """Not of roles, ids and JSON around them; of tool calls their names and arguments count."""
    silent = call(1, "small", 0, 0)
    assert silent.span is not None
    tool = {"id": "call_0123456789", "function": {"name": "find", "arguments": '{"q":"x"}'}}
    silent.span.attributes["gen_ai.input.messages"] = dump(
        [{"role": "user", "content": "12345678"}, {"role": "assistant", "tool_calls": [tool]}]
    )
    silent.span.attributes["gen_ai.output.messages"] = dump([{"content": "word"}])
    attempt, rollout = make_attempt("1", reward=1.0), make_rollout("1")
    evidence = evidence_of(build_episode(attempt, rollout, [silent.span], []), None)
    assert evidence.usage == {"small": (6, 1)}  # 8 + 4 + 9 bytes, and 4


async def test_a_budget_that_sees_no_call_says_so(server: ScriptedServer, tmp_path: Path) -> None:
    """The app's client may be one that lightspan does not see, whose calls cost something too."""
    world = World(tmp_path)
    options = {"max_rollouts": 40, "max_cost": 99.0, "prices": PRICES}
    result = await search(gepa(server, **options), world)
    bound = "no model call of the app was seen, so reflections alone count for max_cost"
    assert sum(note.startswith(bound) for note in world.notes) == 1
    assert any(
        note.endswith("by prices=, for reflections alone: no call of the app was seen")
        for note in result.notes()
    )
    seen = World(tmp_path / "seen", calls=[call(1, "small", 90, 10)])
    result = await search(gepa(server, **options), seen)
    assert not any("reflections alone" in note for note in [*seen.notes, *result.notes()])


async def test_a_reflection_without_usage_is_estimated(tmp_path: Path) -> None:
    script = lambda request: Reply(text=reflects(request), counts_tokens=False)  # noqa: E731
    with ScriptedServer(script) as server:
        result = await search(gepa(server, max_tokens=3_000), World(tmp_path))
    assert result.estimated == result.reflections > 1
    assert result.ended.startswith("max_tokens=3000 is used up")
    assert any("came without a count of tokens" in note for note in result.notes())


async def test_policies_cost_nothing(server: ScriptedServer, tmp_path: Path) -> None:
    silent, own = call(2, "who knows", 0, 0), call(3, "policy", 50, 50)
    # like a call whose client disconnected before any token: it has no record
    assert own.span is not None
    own.span.attributes["lightspan.policy"] = "policy"
    result = await search(
        gepa(server, max_cost=1000.0, prices=PRICES, max_reflections=1),
        World(tmp_path, calls=[silent, own]),
    )
    [line] = reflections(tmp_path)
    cost = (line["input_tokens"] * 2000.0 + line["output_tokens"] * 10_000.0) / 1e6
    assert result.cost == pytest.approx(cost, rel=1e-12)


async def test_a_call_without_a_model_has_no_price(server: ScriptedServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a call of the app has tokens but no model name"):
        await search(
            gepa(server, max_cost=9.0, prices=PRICES), World(tmp_path, calls=[call(1, "", 9, 1)])
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_cost": 0, "prices": PRICES}, "max_cost=0 must be a finite number above 0"),
        ({"max_cost": 1.0}, r"max_cost=1 needs the price .* has none for 'thinker'"),
        ({"max_cost": 1.0, "prices": None}, "prices=None: use {model: Price"),
        ({"max_cost": 1.0, "prices": {"thinker": 2.0}}, r"prices\['thinker'\]=2.0: use Price"),
    ],
)
def test_wrong_budgets(server: ScriptedServer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gepa(server, **options)


@pytest.mark.parametrize("given", [-1.0, float("nan"), "2", None])
def test_a_price_is_a_number(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"Price\(output=\)"):
        Price(input=0.0, output=given)
