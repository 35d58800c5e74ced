"""Test `--data DIR` with Spider's published folder and the tutorial's parquet files."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lightspan.errors import DataError
from lightspan_examples.script import main
from lightspan_testing.tiny import tiny_model
from sql_example import spider, training, worlds
from sql_example.reward import execution_accuracy
from sql_example.worlds import app_input
from tests.reports.ui_numbers import check_run

SIZES = {"train": 3, "dev": 1, "test": 2}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    worlds.generate(folder, worlds=SIZES, questions_per_world=4)
    return folder


def spider_entries(generated: Path, split: worlds.Split) -> list[dict[str, object]]:
    """Return a split in the format of Spider's lists, including unused fields."""
    return [
        {
            "db_id": Path(task["databases"][0]).stem,
            "query": task["gold"],
            "question": task["question"],
            "sql": {"select": []},
        }
        for task in worlds.load(generated, split)
    ]


def copy_databases(generated: Path, folder: Path, names: Iterable[object]) -> None:
    for name in names:
        (folder / str(name)).mkdir(parents=True, exist_ok=True)
        shutil.copy(generated / "databases" / f"{name}.sqlite", folder / str(name))


@pytest.fixture
def published(generated: Path, tmp_path: Path) -> Path:
    """Return a folder like Spider's: lists in JSON, and all databases in one folder."""
    folder = tmp_path / "spider"
    train, test = (spider_entries(generated, split) for split in ("train", "test"))
    copy_databases(generated, folder / "database", {e["db_id"] for e in [*train, *test]})
    (folder / "tables.json").write_text("[]")
    (folder / "train_spider.json").write_text(json.dumps(train[:8]))
    (folder / "train_others.json").write_text(json.dumps(train[8:]))
    (folder / "dev.json").write_text(json.dumps(test))
    return folder


@pytest.fixture
def tutorial(generated: Path, tmp_path: Path) -> Path:
    """Return a folder like the tutorial's: lists in parquet, and held-out databases apart."""
    folder = tmp_path / "data"
    for name, split, databases in (
        ("train_spider.parquet", "train", "database"),
        ("test_dev_500.parquet", "test", "test_database"),
    ):
        entries = [
            {key: entry[key] for key in ("db_id", "question", "query")}
            for entry in spider_entries(generated, split)  # type: ignore[arg-type]
        ]
        copy_databases(generated, folder / databases, {entry["db_id"] for entry in entries})
        parquet.write_table(pa.Table.from_pylist(entries), folder / name)
    return folder


def test_the_published_folder(published: Path, generated: Path) -> None:
    loaded = spider.load(published, "train")
    assert [file.name for file in loaded.files] == ["train_spider.json", "train_others.json"]
    assert loaded.skipped == []
    originals = worlds.load(generated, "train")
    assert [task["question"] for task in loaded.tasks] == [t["question"] for t in originals]
    assert [task["ordered"] for task in loaded.tasks] == [t["ordered"] for t in originals]
    first, original = loaded.tasks[0], originals[0]
    name = Path(original["databases"][0]).stem
    assert first["id"] == "train_spider.json[0]"
    assert first["databases"] == [f"database/{name}/{name}.sqlite"]
    assert sorted(first["schema"].splitlines()) == sorted(original["schema"].splitlines())
    assert app_input(first, published)["db"] == str(published / first["databases"][0])
    for task in loaded.tasks:
        assert execution_accuracy(task["gold"], task, published) == 1.0
        assert execution_accuracy("SELECT 'nothing'", task, published) == 0.0
    held_out = spider.load(published, "test")
    assert [file.name for file in held_out.files] == ["dev.json"]
    assert len(held_out.tasks) == 8
    assert len({task["id"] for task in (*loaded.tasks, *held_out.tasks)}) == 12 + 8


def test_the_tutorials_parquet_files(tutorial: Path, published: Path) -> None:
    for split in ("train", "test"):
        from_parquet = spider.load(tutorial, split)  # type: ignore[arg-type]
        from_json = spider.load(published, split)  # type: ignore[arg-type]
        assert [t["question"] for t in from_parquet.tasks] == [
            t["question"] for t in from_json.tasks
        ]
        assert [t["gold"] for t in from_parquet.tasks] == [t["gold"] for t in from_json.tasks]
    held_out = spider.load(tutorial, "test", limit=3)
    assert len(held_out.tasks) == 3
    assert held_out.tasks[0]["databases"][0].startswith("test_database/")


def test_what_cannot_be_scored_is_left_out_by_name(published: Path) -> None:
    entries = json.loads((published / "dev.json").read_text())
    database = published / "database" / "many" / "many.sqlite"
    database.parent.mkdir()
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", [(i,) for i in range(1_001)])
    entries[0]["query"] = "SELECT x FROM nowhere"
    entries[1] |= {"db_id": "many", "query": "SELECT x FROM t"}
    (published / "dev.json").write_text(json.dumps(entries))
    loaded = spider.load(published, "test")
    assert len(loaded.tasks) == 6
    assert loaded.skipped == [
        f"dev.json[0]: its query fails on {entries[0]['db_id']}.sqlite: no such table: nowhere",
        "dev.json[1]: its query has over 1000 rows",
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("notes.txt", "", r"no list of questions for test; one of test_dev_500\.pa"),
        ("dev.json", "[", r"dev\.json cannot be read"),
        ("test_dev.parquet", "no parquet", r"test_dev\.parquet cannot be read"),
        (
            "dev.json",
            '[{"db_id": "x", "question": 3}]',
            r"dev\.json\[0\] has no text question, query",
        ),
        (
            "dev.json",
            '[{"db_id": "../x", "question": "q", "query": "q"}]',
            r"'\.\./x' is no name of a database",
        ),
    ],
)
def test_bad_folders(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        spider.load(tmp_path, "test")


@pytest.fixture
def train_py(
    script_of: Callable[[str], Any], torch_threads: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Return a function that runs `train.py` in this process for one step of 16 rollouts.

    It returns the script's exit status.
    """
    fewer = replace(training.REAL_MODEL, group_size=4, tasks_per_step=4)
    monkeypatch.setattr(training, "REAL_MODEL", fewer)
    script = script_of("sql")
    return lambda *arguments: main(script.EXAMPLE, script.__doc__, [*map(str, arguments)])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_script_with_a_real_architecture(
    published: Path,
    tmp_path: Path,
    train_py: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check `--model`, `--data`, `--dev` and `--lora` with a tiny model of a real architecture."""
    texts = [t["schema"] + t["question"] for t in spider.load(published, "train").tasks]
    model = tiny_model(tmp_path / "model", seed=0, context=192, texts=texts)
    common = ("--model", model, "--data", published, "--runners", "2")

    # a rollout ends where the rewriter's prompt is longer than the context, and that is said;
    # a model that knows nothing may also stop at once, after which that prompt fits
    status = train_py(*common, "--dev")
    seen = capsys.readouterr()
    if status == 1:
        assert "train.py: all 16 rollouts failed, the first: context_overflow: " in seen.err
    else:
        assert status == 0
        some = r"^! 1[2-5] of 16 rollouts failed, first of all: context_overflow: "
        assert re.search(some, seen.out, re.MULTILINE)
    assert re.search(r"^  write_query +policy +16 .* 16 +0 +0$", seen.out, re.MULTILINE)
    assert re.search(r"^  check_query +- +\d+ .* 0 +\d+ +0$", seen.out, re.MULTILINE)
    assert not (tmp_path / "run").exists()

    # short answers fit into the rewriter's prompt: a training whose rollouts all fail is stopped
    monkeypatch.setattr(training, "REAL_MODEL", replace(training.REAL_MODEL, max_tokens=16))
    wide = tiny_model(tmp_path / "wide", seed=0, context=512, texts=texts)
    common, run = ("--model", wide, *common[2:]), tmp_path / "run"
    assert train_py(*common, "--lora", "--folder", run, "--steps", "1", "--held-out", "4") == 0
    assert "held-out execution accuracy: " in capsys.readouterr().out
    kept = {path.name for path in (run / "model").iterdir()}
    assert "adapter_config.json" in kept
    assert "model.safetensors" not in kept
    asyncio.run(check_run(run))
