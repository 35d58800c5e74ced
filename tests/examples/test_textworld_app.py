"""Test the app that plays TextWorld, its games, its demonstrations and its controls.

Games are made by TextWorld's own compiler and played by its own engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textworld", reason="textworld is not installed: it needs gcc, for jericho")

import lightspan_langgraph
from lightspan_testing.scripted import ScriptedServer
from tests.reports.ui_numbers import check_run
from textworld_example import demonstrations, games, reward, training
from textworld_example.app import LIMIT, RULES, build_graph, chat_model, commands, graph, start
from textworld_example.command import main

COUNTS: dict[games.Split, int] = {"train": 2, "dev": 1, "test": 1}
SCRIPT = Path(__file__).parents[2] / "examples" / "textworld" / "app.py"

pytestmark = [
    pytest.mark.slow,
    # textworld ignores it when it is imported, which pytest undoes
    pytest.mark.filterwarnings("ignore:Game .* is not fully supported"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games")
    games.generate(folder, counts=COUNTS)
    return folder


@pytest.fixture(scope="module")
def task(data: Path) -> games.Task:
    return games.load(data, "train")[0]


@pytest.fixture(scope="module")
def game(data: Path, task: games.Task) -> str:
    return str(data / task["game"])


def way(task: games.Task) -> list[str]:
    return [*(f"go {direction}" for direction in task["route"].split()), "take coin"]


def play(game: str, answers: Sequence[str], limit: int = LIMIT) -> tuple[dict[str, Any], list[str]]:
    """Run the graph; return its final state, and the prompts without the rules."""
    with ScriptedServer(answers) as server:
        model = chat_model("scripted", base_url=server.url, api_key="k", temperature=0.7)
        final = build_graph(model, limit=limit).invoke({"game": game})
        for request in server.requests:
            assert [message["role"] for message in request.messages] == ["system", "user"]
            assert request.messages[0]["content"] == RULES
            assert request.body["temperature"] == 0.7
        return final, [request.last_text for request in server.requests]


# --- the app --------------------------------------------------------------------------------
def test_a_game_that_is_won(game: str, task: games.Task) -> None:
    right = way(task)
    final, prompts = play(game, [*right, "never asked"])
    assert final["now"].won
    assert final["done"] == right
    assert len(prompts) == len(right) == games.ROOMS
    for count, prompt in enumerate(prompts):
        objective, done, seen, offered = prompt.split("\n")
        assert "coin" in objective
        assert done == f"Done: {', '.join(right[:count]) or 'nothing'}"
        assert seen.startswith("-= ")
        assert right[count] in offered.removeprefix("Commands: ").split(", ")
    assert len({prompt.split("\n")[0] for prompt in prompts}) == 1


def test_an_answer_that_is_no_command_is_used_up(game: str, task: games.Task) -> None:
    final, prompts = play(game, ["examine floor", "I think I should go", *way(task)[:1]], limit=3)
    assert not final["now"].won
    assert final["done"] == ["nothing", "nothing", way(task)[0]]
    rooms = [prompt.split("\n")[2] for prompt in prompts]
    assert rooms[0] == rooms[1] == rooms[2]


def test_commands_that_change_nothing_are_not_offered(game: str) -> None:
    now = start(game).reset()
    assert {"inventory", "look"} <= set(now.admissible_commands)
    assert all(each.startswith("go ") for each in commands(now))


def test_threads_may_load_games_at_once(data: Path) -> None:
    """Check 24 loads on 8 threads, which share TextWorld's parser."""
    paths = [str(path) for path in sorted(data.glob("*.z8"))] * 6
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda path: start(path).reset().objective, paths))
    assert seen[:4] * 6 == seen


def test_the_agents_of_the_graph() -> None:
    assert lightspan_langgraph.agents(graph).paths == ("open_game", "play", "act")
    assert training.TRAINED == ["play"]


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        build_graph(limit=0)


# --- games ----------------------------------------------------------------------------------
def test_equal_seeds_give_equal_games(data: Path, task: games.Task, tmp_path: Path) -> None:
    again = games.generate(tmp_path, counts={"train": 1})["train"]
    assert again == [task]
    assert (tmp_path / task["game"]).read_bytes() == (data / task["game"]).read_bytes()


def test_splits_share_no_route(data: Path) -> None:
    for split in games.SPLITS:
        tasks = games.load(data, split)
        assert [task["id"] for task in tasks] == [
            f"{split}-{number:04d}" for number in range(COUNTS[split])
        ]
        assert {games.route_split(task["route"]) for task in tasks} == {split}


def test_held_out_games_are_there_several_times(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_data", lambda cache_dir, reporter: data)
    assert len(training.load_tasks(data, "train")) == COUNTS["train"]
    tasks = training.load_tasks(data, "test")
    assert [task["id"] for task in tasks] == [
        f"test-0000/{attempt}" for attempt in range(training.ATTEMPTS["test"])
    ]
    assert all(Path(task["game"]).is_file() for task in tasks)


# --- demonstrations, reward and controls ----------------------------------------------------
def test_demonstrations_are_offered_commands_and_repeatable(game: str) -> None:
    chats = demonstrations.demonstrate([Path(game)], 60, 3)
    assert len(chats) == 60
    assert chats == demonstrations.demonstrate([Path(game)], 60, 3)
    for chat in chats:
        rules, asked, answer = (message["content"] for message in chat["messages"])
        assert rules == RULES
        assert answer in asked.split("Commands: ")[1].split(", ")


def test_a_demonstrator_without_mistakes_wins(
    game: str, task: games.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstrations, "MISTAKE_RATE", 0.0)
    chats = demonstrations.play(start(game, demonstrations.WITH_PLAN), random.Random(0))
    assert [chat["messages"][-1]["content"] for chat in chats] == way(task)


def test_the_reward_of_an_attempt(
    game: str, task: games.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = {**task, "game": game, "max_tokens": 16, "limit": LIMIT}
    with ScriptedServer([*way(task), *["?"] * LIMIT]) as server:
        model = chat_model("m", base_url=server.url, api_key="k")
        monkeypatch.setattr(training, "_graph", lambda max_tokens, limit: build_graph(model))
        assert [training.answer(attempt), training.answer(attempt)] == [1.0, 0.0]
        assert len(server.requests) == games.ROOMS + LIMIT


def test_players_without_a_model(data: Path) -> None:
    tasks = [task for split in games.SPLITS for task in games.load(data, split)]
    routes = [task["route"] for task in tasks]
    scores = reward.constant_scores([data / task["game"] for task in tasks], routes)
    assert 0 <= scores[reward.CHANCE] < 0.5
    for route in routes:
        assert scores[route] >= routes.count(route) / len(tasks)
    assert set(scores) == {reward.CHANCE, "the first command", "the last command", *routes}


# --- commands -------------------------------------------------------------------------------
def test_a_key_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "OPENAI_API_KEY is not set" in capsys.readouterr().err


def test_no_endpoint_answers(
    game: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert main(["--game", game]) == 1
    assert capsys.readouterr().err.endswith(": Connection error.\n")


def test_the_script(game: str, task: games.Task) -> None:
    command = [sys.executable, str(SCRIPT), "--game", game, "--model", "named"]
    with ScriptedServer(way(task)) as server:
        environment = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "own"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    printed = [*(f"> {each}" for each in way(task)), "won with 5 commands"]
    assert (done.stdout.splitlines(), done.stderr, done.returncode) == (printed, "", 0)


def test_the_app_knows_neither_lightspan_nor_torch() -> None:
    code = (
        "import textworld_example.command, sys; "
        "print(sorted({'lightspan', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_short_training(data: Path, tmp_path: Path) -> None:
    """Train the small model in a step of `train.py`, from games that are there already."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "data").symlink_to(data)
    from lightspan_examples.data import _digest

    (data / "complete").write_text(_digest(games.generate))
    command = [sys.executable, str(SCRIPT.with_name("train.py")), "--demonstrations", "100"]
    command += ["--steps", "1", "--held-out", "4", "--runners", "8", "--validate-every", "0"]
    command += ["--folder", str(tmp_path / "run"), "--cache", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(n=4" in done.stdout.splitlines()[-1], "what it gained"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [step["step"] for step in map(json.loads, lines) if step["kind"] == "train"] == [1]
    asyncio.run(check_run(tmp_path / "run"))
