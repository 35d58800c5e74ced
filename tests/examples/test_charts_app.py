"""Test the app that reads charts, its charts and tasks, its demonstrations and its controls."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import lightspan_langgraph
from charts_example import charts, demonstrations, reward, tasks, training
from charts_example.app import ASKED, build_graph, chat_model, graph
from charts_example.charts import Chart, draw
from charts_example.command import main
from charts_example.questions import parse, parse_reading, write_reading
from lightspan_testing.scripted import ScriptedServer

SCRIPT = Path(__file__).parents[2] / "examples" / "charts" / "app.py"
CHART = Chart(
    form="bars", title="Tea", columns={"B": 3, "A": 9, "C": 1}, colour="teal", background="white"
)
TEAL, WHITE = (0, 128, 128), (255, 255, 255)


def ask(chart: bytes, question: str, reading: str) -> tuple[dict[str, Any], Any]:
    """Run the graph with a scripted reading; return its final state and the one request."""
    with ScriptedServer([reading]) as server:
        model = chat_model("scripted", base_url=server.url, api_key="k", temperature=0.7)
        final = build_graph(model).invoke({"chart": chart, "question": question})
        (request,) = server.requests
    return final, request


# --- the app --------------------------------------------------------------------------------
def test_the_reader_sees_the_chart_and_the_computer_computes() -> None:
    chart = draw(CHART)
    final, request = ask(chart, "What is A plus C?", " A 9, C 1\n")
    assert final == {
        "chart": chart,
        "question": "What is A plus C?",
        "reading": "A 9, C 1",
        "answer": 10,
    }
    url = f"data:image/png;base64,{base64.b64encode(chart).decode()}"
    assert request.messages == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": ASKED},
                {"type": "image_url", "image_url": {"url": url}},
            ],
        },
    ]
    assert request.body["temperature"] == 0.7


def test_a_reading_that_lacks_a_value_has_no_answer() -> None:
    final, _ = ask(draw(CHART), "What is A plus C?", "A is 9, and I cannot see the rest.")
    assert final["answer"] is None


def test_the_agents_of_the_graph() -> None:
    assert lightspan_langgraph.agents(graph).paths == ("reader", "computer")
    assert training.TRAINED == ["reader"]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is A plus C?", 10),
        ("How far apart are B and A?", 6),
        ("How far apart are A and B?", 6),
        ("What is the largest of C, A and B?", 9),
    ],
)
def test_questions_are_computed(question: str, answer: int) -> None:
    assert parse(question).answer(CHART["columns"]) == answer


def test_another_question_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'Why\?' is of no known form; ask like 'What is A plus"):
        parse("Why?")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("A 3, C 5", {"A": 3, "C": 5}),
        ("A=3 C: 5", {"A": 3, "C": 5}),
        ("A 3, A 3", {"A": 3}),
        ("A 3, A 4, B 1", {"B": 1}),
        ("three", {}),
    ],
)
def test_readings_are_parsed(text: str, read: dict[str, int]) -> None:
    assert parse_reading(text) == read
    assert parse_reading(write_reading(read)) == read


# --- charts and tasks -----------------------------------------------------------------------
def pixels(chart: Chart) -> Image.Image:
    return Image.open(io.BytesIO(draw(chart)))


def test_bars_are_as_high_as_their_values() -> None:
    image = pixels(CHART)
    assert (image.size, image.mode, image.format) == ((84, 84), "RGB", "PNG")
    heights = [
        sum(image.getpixel((x, y)) == TEAL for y in range(charts.SIDE)) for x in (14, 42, 70)
    ]
    assert heights == [16, 46, 6]


def test_points_of_a_line_are_as_high_as_their_values() -> None:
    image = pixels({**CHART, "form": "line"})
    for x, value in zip((14, 42, 70), (3, 9, 1), strict=True):
        assert image.getpixel((x, 70 - 5 * value)) == TEAL


def test_a_table_shows_its_values() -> None:
    """Compare the cells of two tables: they differ exactly where the values differ."""
    first, second = (
        pixels({**CHART, "form": "table", "columns": {"B": 3, "A": value, "C": 1}})
        for value in (9, 8)
    )
    cells = [(28 * number, 0, 28 * number + 28, 84) for number in range(3)]
    same = [first.crop(cell).tobytes() == second.crop(cell).tobytes() for cell in cells]
    assert same == [True, False, True]


def test_equal_charts_are_equal_files() -> None:
    assert draw(CHART) == draw(dict(CHART))  # type: ignore[arg-type]
    assert draw(CHART) != draw({**CHART, "title": "Milk"})


def test_equal_seeds_give_equal_tasks() -> None:
    assert tasks.tasks("test", 20) == tasks.tasks("test")[:20]
    assert tasks.tasks("train", 5, seed=1) != tasks.tasks("train", 5)


def test_splits_share_no_values_titles_or_colours() -> None:
    seen: dict[str, tuple[set[Any], ...]] = {}
    for split in tasks.COUNTS:
        shown = [task["chart"] for task in tasks.tasks(split)]
        assert len(shown) == tasks.COUNTS[split]
        seen[split] = (
            {tuple(chart["columns"].values()) for chart in shown},
            {chart["title"] for chart in shown},
            {chart["colour"] for chart in shown},
            {chart["background"] for chart in shown},
        )
    for first, second in itertools.combinations(seen.values(), 2):
        for one, other in zip(first, second, strict=True):
            assert not one & other


def test_forms_and_kinds_of_question_are_equally_frequent() -> None:
    counts = Counter(
        (task["chart"]["form"], parse(task["question"]).kind.text)
        for task in tasks.tasks("train", 90)
    )
    assert set(counts.values()) == {10}
    assert len(counts) == 9


def test_answers_are_those_of_the_charts() -> None:
    for task in tasks.tasks("dev"):
        reading = write_reading(task["chart"]["columns"])
        assert parse(task["question"]).answer(parse_reading(reading)) == task["answer"]


# --- demonstrations, reward and controls ----------------------------------------------------
def test_demonstrations_are_repeatable_and_in_the_style_of_train() -> None:
    chats = demonstrations.demonstrate(40, 3)
    assert chats == demonstrations.demonstrate(40, 3)
    assert chats != demonstrations.demonstrate(40, 4)
    for chat in chats:
        asked, answer = chat["messages"]
        text, picture = asked["content"]
        assert text == {"type": "text", "text": ASKED}
        assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
        assert "".join(parse_reading(answer["content"])) == tasks.NAMES


def test_two_values_of_five_are_misread() -> None:
    rng = random.Random(0)
    read = {
        (form, name): Counter(
            demonstrations.read({**CHART, "form": form}, name, rng) for _ in range(400)
        )
        for form in charts.FORMS
        for name in CHART["columns"]
    }
    assert {key: set(counts) for key, counts in read.items()} == {
        ("bars", "B"): {3, 2},
        ("bars", "A"): {9, 8},
        ("bars", "C"): {1, 2},
        ("line", "B"): {3, 9},
        ("line", "A"): {9, 1},
        ("line", "C"): {1, 3},
        ("table", "B"): {3, 2},
        ("table", "A"): {9, 8},
        ("table", "C"): {1, 2},
    }
    for (_, name), counts in read.items():
        assert 200 < counts[CHART["columns"][name]] < 280


def test_the_reward_of_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    task = training.load_tasks(Path(), "test")[0]
    right = write_reading(task["chart"]["columns"])
    with ScriptedServer([right, "A 10, B 10, C 10", "?"]) as server:
        model = chat_model("m", base_url=server.url, api_key="k")
        monkeypatch.setattr(training, "_graph", lambda max_tokens: build_graph(model))
        assert [training.answer(task) for _ in range(3)] == [1.0, 0.0, 0.0]
        url = server.requests[0].messages[0]["content"][1]["image_url"]["url"]
    digest = hashlib.sha256(draw(task["chart"])).digest()
    assert hashlib.sha256(base64.b64decode(url.partition(",")[2])).digest() == digest


def test_exchanged_charts() -> None:
    every = tasks.tasks("test", 6)
    exchanged = reward.exchanged(every)
    assert [task["question"] for task in exchanged] == [task["question"] for task in every]
    assert [task["answer"] for task in exchanged] == [task["answer"] for task in every]
    assert [task["chart"] for task in exchanged] == [
        task["chart"] for task in [*every[3:], *every[:3]]
    ]


def test_what_is_earned_without_looking() -> None:
    def task(question: str, a: int, b: int) -> tasks.Task:
        chart = Chart(**{**CHART, "columns": {"A": a, "B": b, "C": 9}})
        answer = parse(question).answer(chart["columns"])
        assert answer is not None
        return tasks.Task(id="", chart=chart, question=question, answer=answer)

    some = [
        task("What is A plus B?", 1, 2),  # 3; with the chart of the next 3, of the last 5
        task("What is A plus B?", 2, 1),  # 3; 3 and 5
        task("How far apart are A and B?", 1, 4),  # 3; 1 and 1
    ]
    assert reward.exchanged_score(some) == 2 / 6
    assert reward.constant_scores(some) == {"3": 1.0, "the best for each kind of question": 1.0}
    found = reward.constant_scores(tasks.tasks("test"))
    assert max(found.values()) < 0.22
    assert reward.exchanged_score(tasks.tasks("test")) < 0.15


# --- commands -------------------------------------------------------------------------------
def test_the_script(tmp_path: Path) -> None:
    chart = tmp_path / "chart.png"
    chart.write_bytes(draw(CHART))
    command = [sys.executable, str(SCRIPT), "What is A plus C?", "--chart", str(chart)]
    with ScriptedServer(["A 9, C 1"]) as server:
        environment = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "own"}
        done = subprocess.run(
            [*command, "--model", "named"], capture_output=True, text=True, env=environment
        )
        assert (done.stdout, done.stderr, done.returncode) == ("read: A 9, C 1\n10\n", "", 0)
        (request,) = server.requests
    assert request.body["model"] == "named"
    assert request.headers["authorization"] == "Bearer own"


def test_the_command_draws_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--draw", str(tmp_path / "chart.png")]) == 0
    assert capsys.readouterr().out == f"drew {tmp_path / 'chart.png'}\n"
    with Image.open(tmp_path / "chart.png") as image:
        assert image.size == (84, 84)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no question: ask like"),
        (["Why?"], "is of no known form"),
        (["What is A plus C?", "--chart", "missing.png"], "missing.png"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


def test_a_reading_that_is_incomplete_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(["?"]) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert main(["What is A plus C?", "--model", "m"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "read: ?\n"
    assert printed.err == "the reading lacks a value that the question needs\n"
