"""Tests of the web page's numbers on trained runs: they are those of `lightspan inspect`."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightspan_ui.views as v
from lightspan import SFT, Trainer
from lightspan.cli import main
from lightspan.errors import ConfigError
from lightspan.production.feedback import feedback
from lightspan.progress import SilentReporter
from lightspan.stores import open_store
from lightspan_prompts.search.candidates import Candidate, read_searches
from lightspan_testing.scripted import ScriptedServer
from lightspan_ui.searches import candidate_views
from lightspan_ui.server import PREFIX
from lightspan_ui.sources import Sources
from lightspan_ui.tokens import Tokenizer
from packages.ui.tests.recorded import record
from packages.ui.tests.ui_client import serving
from tests.reports.ui_numbers import check_run, check_store

SILENT = SilentReporter()
APPS = Path(__file__).parents[1] / "apps"


def check(folder: Path) -> None:
    asyncio.run(check_run(folder))


def train(
    algorithm: Any, folder: Path, app: Any, *data: Any, resume: bool = False, **o: Any
) -> Any:
    """Train, or resume, and check the numbers of the run."""
    trainer = Trainer(algorithm, folder=folder, reporter=SILENT, **o)
    result = trainer.fit(app, *data, resume=resume)
    check(folder)
    return result


def test_a_run_with_a_frozen_agent(one_step: tuple[Path, list[Any]]) -> None:
    check(one_step[0])


@pytest.mark.slow
def test_failures_and_named_rewards(apps: Any, rl: Any, tmp_path: Path) -> None:
    tasks = [{"q": give, "give": give} for give in ("named", "low", "gone")]
    emitted = {"q": "emitted", "give": "gone", "emit": 0.25}
    train(rl(tasks_per_step=4), tmp_path / "run", apps.odd, [*tasks, emitted], tasks, steps=1)


@pytest.mark.slow
def test_a_resumed_run_and_a_crashed_one(apps: Any, rl: Any, ask: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(rl(), folder, apps.spell, ask(4), ask(2), steps=2)
    train(rl(), folder, apps.spell, ask(4), ask(2), steps=3, resume=True)
    (folder / "result.json").unlink()
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:-2]) + lines[-2][:40])  # killed in its third step
    check(folder)


@pytest.mark.slow
def test_a_run_whose_steps_overlap(apps: Any, rl: Any, ask: Any, tmp_path: Path) -> None:
    train(rl(overlap=1), tmp_path / "run", apps.spell, ask(6), steps=3)


@pytest.mark.slow
def test_a_run_that_a_function_scores(apps: Any, rl: Any, ask: Any, tmp_path: Path) -> None:
    def short(answer: str) -> float:
        return {"reward": 1 / (1 + len(answer)), "length": float(len(answer))}  # type: ignore[return-value]

    folder = tmp_path / "run"
    train(rl(), folder, apps.spell, ask(4), ask(2), steps=2, reward=short)

    async def scorers() -> Any:
        async with serving(folder) as client:
            run = await client.get("/runs/run", v.RunDetail)
            page = await client.get("/runs/run/rollouts", v.RolloutPage, limit=1)
            return run.scorers, page.rows[0].dimensions

    means, dimensions = asyncio.run(scorers())
    assert means["short"].n == 20
    assert dimensions.keys() == {"reward", "length", "app"}


@pytest.mark.slow
def test_a_run_with_a_critic(apps: Any, rl: Any, ask: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    algorithm = rl(estimator="ppo", group_size=1, tasks_per_step=4)
    train(algorithm, folder, apps.spell, ask(4), ask(2), steps=2)

    async def read() -> tuple[v.Metrics, list[v.ChoiceDetail]]:
        async with serving(folder) as client:
            metrics = await client.get("/runs/run/metrics", v.Metrics)
            query = {"mode": "train", "step": 2, "limit": 1}
            page = await client.get("/runs/run/rollouts", v.RolloutPage, **query)
            path = f"/runs/run/rollouts/{page.rows[0].rollout_id}"
            rollout = await client.get(path, v.RolloutDetail)
            calls = [each.call_id for each in rollout.calls if each.fate == "trained"]
            details = [await client.get(f"{path}/calls/{name}", v.CallDetail) for name in calls]
            return metrics, [choice for detail in details for choice in detail.choices]

    metrics, choices = asyncio.run(read())
    assert [point.x for point in metrics.series["learner/value_loss"]] == [1, 2]
    assert choices
    for choice in choices:
        assert "the critic expected" in choice.call.why
        assert choice.reasons is not None
        assert choice.reasons.estimator == "ppo"


@pytest.mark.slow
def test_a_pruned_run(apps: Any, rl: Any, ask: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(rl(), folder, apps.spell, ask(6), steps=3)
    assert main(["prune", str(folder / "store.db"), "--older-than", "0s", "--yes"]) == 0
    check(folder)


@pytest.mark.slow
def test_a_run_that_searched_for_prompts(apps: Any, tmp_path: Path) -> None:
    toy = importlib.import_module("gepa_toy")
    folder = tmp_path / "run"
    with ScriptedServer(toy.speaks) as app, ScriptedServer(toy.reflects) as thinker:
        toy.train(folder, app.url, thinker.url)
    check(folder)

    [search] = asyncio.run(searches_of(folder))
    assert search.verdict
    assert [each.number for each in search.candidates if each.is_chosen] == [
        max(range(len(search.candidates)), key=lambda n: search.candidates[n].mean or 0.0)
    ]
    assert any(proposal.candidate is not None for proposal in search.proposals)
    assert all(search.tasks.values())
    # the same search before its end: what its log and proposals tell
    shutil.copytree(folder, tmp_path / "cut" / "run")
    cut = tmp_path / "cut" / "run"
    for name in ("result.json", "prompts.json", "journal/candidates.json"):
        (cut / name).unlink()
    (cut / "lock").write_text("4194999")  # no such process
    [running] = asyncio.run(searches_of(cut))
    assert (running.verdict, running.ended) == ("", "the run was stopped")
    compared = [(each.texts, each.parents, each.scores) for each in search.candidates]
    assert [(each.texts, each.parents, each.scores) for each in running.candidates] == compared
    assert running.proposals == search.proposals
    assert (running.rollouts, running.reflections) == (search.rollouts, search.reflections)


@pytest.mark.slow
def test_a_run_that_searched_with_critiques(apps: Any, tmp_path: Path) -> None:
    toy, answering = importlib.import_module("apo_toy"), importlib.import_module("gepa_toy")
    folder = tmp_path / "run"
    with ScriptedServer(answering.speaks) as app, ScriptedServer(toy.reflects) as thinker:
        result = toy.train(folder, app.url, thinker.url)
    check(folder)

    [search] = asyncio.run(searches_of(folder))
    [found] = read_searches(folder).values()
    assert search.verdict == found.verdict()
    assert (search.rollouts, search.reflections) == (found.rollouts, found.reflections)
    assert [each.mean for each in search.candidates] == [each.mean for each in found.candidates]
    [chosen] = [each for each in search.candidates if each.is_chosen]
    assert chosen.number == found.chosen
    after = {name: prompt.after.template for name, prompt in result.prompts.items()}
    assert chosen.texts == after


async def searches_of(folder: Path) -> list[v.SearchView]:
    async with serving(folder) as client:
        return (await client.get(f"/runs/{folder.name}/prompts", v.Prompts)).searches


@pytest.mark.slow
def test_a_run_of_prompts_and_weights_in_turns(apps: Any, tiny: Path, tmp_path: Path) -> None:
    toy = importlib.import_module("alternate_toy")
    folder = tmp_path / "run"
    with ScriptedServer(toy.reflects) as thinker:
        toy.fit(folder, toy.algorithm(tiny, thinker.url))
        check(folder)
        searches = asyncio.run(searches_of(folder))
        assert len(searches) == 2
        assert all(search.name.startswith("step-") and search.verdict for search in searches)
        # killed in its second search
        program = [sys.executable, str(APPS / "alternate_toy.py"), str(tmp_path / "killed")]
        for batches in (8, 7, 6, 5):
            shutil.rmtree(tmp_path / "killed", ignore_errors=True)
            done = subprocess.run([*program, str(tiny), thinker.url, str(batches)], check=False)
            assert done.returncode == -9
            found = asyncio.run(searches_of(tmp_path / "killed"))
            if found and not found[-1].verdict:
                break
    assert found[-1].ended == "the run was stopped"
    assert found[-1].candidates
    check(tmp_path / "killed")


@pytest.mark.slow
async def test_a_fine_tuned_model_is_no_run(
    one_step: tuple[Path, list[Any]], tiny: Path, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
    model = await asyncio.to_thread(SFT(tiny).fit, [chat], tmp_path / "tuned", reporter=SILENT)
    shutil.copytree(one_step[0], tmp_path / "run")
    async with serving(tmp_path) as client:
        assert [run.name for run in (await client.get("/places", v.Places)).runs] == ["run"]
        assert (await client.send(f"{PREFIX}/runs/tuned")).status == 404
    assert model.model == tmp_path / "tuned"
    with pytest.raises(ConfigError, match=r"tuned is the folder of a model, not of a run: .*SFT"):
        Sources([str(model.model)])


@pytest.mark.slow
async def test_a_store_of_production(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    async with open_store(url) as store:
        await record(store, "ro-emitted", reward=0.25)
        await record(store, "ro-failed", fails="boom", service="other")
        for number in range(4):
            await record(store, f"ro-{number}", question=f"question {number}")
        await store.mark_damaged("at-ro-0", "a span is missing")
    ratings = {
        "at-ro-1": 0.5,
        "at-ro-emitted": 1.0,
        "call-at-ro-2-0": 0.125,
        "call-at-ro-2-2": 0.75,
    }
    for name, reward in ratings.items():
        await asyncio.to_thread(feedback, name, reward, store=url)
    await check_store(url)


def test_tokens_are_shown_as_text(one_step: tuple[Path, list[Any]]) -> None:
    async def choices() -> list[v.ChoiceDetail]:
        async with serving(one_step[0]) as client:
            page = await client.get("/runs/run/rollouts", v.RolloutPage, agent="writer", limit=1)
            path = f"/runs/run/rollouts/{page.rows[0].rollout_id}"
            rollout = await client.get(path, v.RolloutDetail)
            name = next(call.call_id for call in rollout.calls if call.agent == "writer")
            return (await client.get(f"{path}/calls/{name}", v.CallDetail)).choices

    [choice] = asyncio.run(choices())
    assert len(choice.tokens) == choice.call.tokens
    assert all(token.logprob <= 0 and token.version >= 0 for token in choice.tokens)
    text = "".join(token.text for token in choice.tokens)
    assert text.strip().startswith(choice.output[0].text.strip())
    assert "<|im_start|>user" in choice.prompt_text


def test_a_character_of_several_tokens_is_shown_once(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {each: n for n, each in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())}
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    bytewise.save(str(tmp_path / "tokenizer.json"))
    text = "né 🙂!"
    ids = bytewise.encode(text).ids
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.pieces(ids) == ["n", "", "é", " ", "", "", "", "🙂", "!"]
    assert tokenizer.pieces(ids[:6]) == [
        "n",
        "",
        "é",
        " ",
        "",
        "\ufffd",
    ]


def test_the_texts_of_candidates_are_what_the_model_gets() -> None:
    """Check a template with braces that are doubled for `str.format`."""
    templates = {"router": 'Answer as {{"to": "x"}}, {name}.', "plain": "Answer."}
    candidate = Candidate(templates=templates, parents=[], rewards={}, mean=0.0, rollouts=0)
    [view] = candidate_views([candidate], None, None)
    assert view.texts == {"router": 'Answer as {"to": "x"}, {name}.', "plain": "Answer."}
