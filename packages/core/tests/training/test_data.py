"""Test tasks: accepted inputs, errors, and the order of epochs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightspan.algorithms.task_sampler import Epochs
from lightspan.errors import DataError
from lightspan.schema.records import fingerprint, task_id
from lightspan.training.data import check_ids, clusters_of, load_distinct, load_tasks


@dataclass
class Question:
    text: str
    tags: tuple[str, ...]


def test_tasks_are_what_json_gives_back() -> None:
    given = iter([Question("a", ("x",)), {"1": (2, 3)}, "text", 4, None, [True]])
    expected = [{"text": "a", "tags": ["x"]}, {"1": [2, 3]}, "text", 4, None, [True]]
    assert load_tasks(given) == expected


def test_keys_stay_in_the_order_of_the_user() -> None:
    """An app may write a dict of its task into a prompt. Ids do not depend on the order."""
    task = {"question": "q", "answer": {"z": 1, "b": 2}}
    [loaded] = load_tasks([task])
    assert repr(loaded) == repr(task)
    assert task_id(loaded) == task_id({"answer": {"b": 2, "z": 1}, "question": "q"})


def test_files_may_have_blank_lines_and_any_line_separator_in_texts(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"q": "a\u2028b"}\r\n\n"c"\n', encoding="utf-8")
    assert load_tasks(path) == load_tasks(str(path)) == [{"q": "a\u2028b"}, "c"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            '{"q": "café"}'.encode("latin-1"),
            "is not UTF-8; each line must be one task: .* 0xe9 ",
        ),
        (b'{"q": "\xed\xa0\xbd"}', "is not UTF-8; each line must be one task: "),
        (rb'{"q": "half \ud83d"}', "is not JSON; each line must be one task: "),
        (rb'{"q": "half \ude00"}', "is not JSON; each line must be one task: "),
    ],
)
def test_what_is_no_text_is_named_with_its_line(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"q": "a"}\n' + line + b"\n")
    with pytest.raises(DataError, match=f"^train: .*tasks.jsonl, line 2 {reason}") as caught:
        load_tasks(path, "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", [{"q": "half \ud83d"}, {"\ude00": 1}, ["a", ["\ud83d"]]])
def test_half_of_an_emoji_is_no_text(task: Any) -> None:
    with pytest.raises(DataError, match=r"^val\[1\] is not JSON: .*surrogates not allowed"):
        load_tasks(["a \U0001f600", task], "val")


@pytest.mark.parametrize("empty", [[], "", "\n\n"])
def test_no_task_is_an_error(tmp_path: Path, empty: Any) -> None:
    if isinstance(empty, str):
        path = tmp_path / "tasks.jsonl"
        path.write_text(empty)
        empty = path
    with pytest.raises(DataError, match=r"^train: there is no task; give at least one\n"):
        load_tasks(empty, "train")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"q": "a"}, r"^train must be a sequence of tasks .* not dict: \{'q': 'a'\}"),
        (7, r"^train must be a sequence of tasks or the path of a .jsonl file, not int: 7"),
        (["a", object()], r"^train\[1\] is not JSON: .*: <object object at"),
        ([{"x": [float("nan")]}], r"^train\[0\] is not JSON: .*Out of range float"),
        ([{"x": b"text"}], r"^train\[0\] is not JSON: .*bytes is not JSON"),
        ([{"q": [{5: 3}]}], r"^train\[0\]\['q'\]\[0\] has the key 5; .*: write '5'$"),
        ([2**70], r"^train\[0\] is not JSON: can't serialize ints"),
        ("nowhere.jsonl", r"^train: nowhere.jsonl cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_task_is_named(tasks: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(tasks, "train")


@pytest.mark.parametrize(
    ("module", "name", "more", "rows"),
    [
        ("pandas.core.frame", "DataFrame", {}, 'to_dict("records")'),
        ("polars.dataframe.frame", "DataFrame", {}, "to_dicts()"),
        ("polars.lazyframe.frame", "LazyFrame", {"collect": None}, "collect().to_dicts()"),
        ("pyarrow.lib", "RecordBatch", {}, "to_pylist()"),
    ],
)
def test_a_data_frame_says_how_to_give_its_rows(
    module: str, name: str, more: dict[str, Any], rows: str
) -> None:
    """Check fake data frames with the names of those of pandas and polars, which are not
    installed.
    """
    body = {"__module__": module, "columns": ["q"], "__iter__": lambda self: iter(["q"]), **more}
    table = type(name, (), body)()
    with pytest.raises(DataError) as caught:
        load_tasks(table, "val")
    assert str(caught.value) == f"val is a {name}: give its rows, as val=val.{rows}"


def test_tables_and_lists_in_files_say_how_to_give_their_rows(tmp_path: Path) -> None:
    """Check the error for a table, whose iteration yields columns, and for a file with a list."""
    import pyarrow

    table = pyarrow.table({"q": ["a", "b"]})
    with pytest.raises(DataError, match=r"^train is a Table: give its rows, as train="):
        load_tasks(table, "train")
    assert load_tasks(table.to_pylist(), "train") == [{"q": "a"}, {"q": "b"}]
    path = tmp_path / "tasks.json"
    path.write_text('[{"q": "a"}, {"q": "b"}]')
    with pytest.raises(DataError, match=r"tasks.json is one list of 2: a file has a task on each"):
        load_tasks(path, "train")
    path.write_text('[\n  {"q": "a"}\n]')
    with pytest.raises(DataError, match=r"line 1 is not JSON; each line must be one task"):
        load_tasks(path, "train")
    with pytest.raises(DataError, match=r"\(train given as text is the path of a .jsonl file\)$"):
        load_tasks("Why is the sky blue?", "train")


def test_equal_tasks_have_one_id_whatever_the_order_of_keys() -> None:
    assert task_id({"a": 1, "b": [2]}) == task_id({"b": [2], "a": 1})
    assert task_id({"a": 1}) != task_id({"a": 2})
    assert task_id({"id": 7, "a": 1}) == task_id({"id": "7"}) == "7"
    assert task_id({"id": None}) == fingerprint({"id": None})
    assert len(task_id("text")) == 16


def test_distinct_tasks() -> None:
    assert load_distinct(["a", "b"]) == ["a", "b"]
    with pytest.raises(DataError, match=r"val\[0\] and val\[2\] are equal, or have one id \(7\)"):
        load_distinct([{"id": 7, "q": "a"}, "b", {"id": "7", "q": "c"}], "val")
    check_ids(["a", {"id": 7}, "a", {"id": 7}], "train", may_repeat=True)
    with pytest.raises(DataError, match=r"train\[0\] and train\[2\] are equal, or have one id"):
        check_ids([{"id": 7}, "b", {"id": 7, "q": "a"}], "train", may_repeat=True)


def test_epochs_use_every_task_before_any_again() -> None:
    epochs = Epochs(list("abcde"), seed=1)
    first, second = epochs.take(0, 5), epochs.take(5, 5)
    assert sorted(first) == sorted(second) == list("abcde")
    assert first != second
    assert epochs.take(3, 4) == [*first[3:], *second[:2]]


def test_clusters_are_what_a_key_of_the_tasks_says() -> None:
    tasks = [{"id": "a", "db": "x"}, {"id": "b", "db": 3}, {"id": "c", "db": "x"}]
    assert clusters_of(tasks, "db") == {"a": "x", "b": "3", "c": "x"}
    assert clusters_of([*tasks, "plain"], None) == {}


@pytest.mark.parametrize("task", [{"id": "d"}, {"db": None}, {"db": 0.5}, {"db": ["x"]}, "db"])
def test_a_task_in_no_cluster_is_an_error(task: Any) -> None:
    expected = r"val\[1\] has no cluster: cluster='db' names a key of every task"
    with pytest.raises(DataError, match=expected):
        clusters_of([{"db": "x"}, task], "db", "val")
