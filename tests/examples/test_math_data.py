"""Test reading Calc-X and GSM8K from small files in the published layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import DataError
from math_example.datasets import load
from math_example.worlds import Task

CALC_X = [
    {
        "id": "ape210k__00000007",
        "question": "A tank of 90 litres is (1/4) full. How many litres are in it?",
        "chain": '<gadget id="calculator">1 / 4</gadget>\n<output>1/4 = around 0.25</output>\n\n'
        '<gadget id="calculator">90 * (1/4)</gadget>\n<output>45/2 = around 22.5</output>\n\n'
        "<result>45/2 = around 22.5</result>",
        "result": "45/2",
        "source_ds": "ape210k",
    },
    {
        "id": "aqua_rat__ab12",
        "question": "How much is 3 times 8?\nPick one:\nA) 11\nB) 24\nC) 38",
        "chain": '<gadget id="calculator">3*8</gadget>\n<output>24</output>\n<result>B</result>',
        "result": "B",
        "source_ds": "aqua_rat",
    },
    {
        "id": "gsm8k__xyz",
        "question": "Ada earns $1,200 a month. How much is that in two months?",
        "chain": '<gadget id="calculator">1200*2</gadget>\n<output>2_400</output>\n'
        "<result>2_400</result>",
        "result": "2,400",
        "source_ds": "gsm8k",
    },
]

GSM8K = [
    {
        "question": "Ada has 3 bags of 4 plums. She eats 2. How many are left?",
        "answer": "She has 3*4=<<3*4=12>>12 plums.\n12-2=<<12-2=10>>10 are left.\n#### 10",
    },
    {
        "question": "A car costs $1,000 more than $200. What does it cost?",
        "answer": "1000+200=<<1000+200=1200>>1,200\n#### 1,200",
    },
]


def write(file: Path, records: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(list(records)), file)
    else:
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["train.jsonl", "train.parquet", "data/train-00000-of-00001-0a1b.parquet"]
)
def test_calc_x(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, CALC_X)
    loaded = load(tmp_path, "train")
    assert (loaded.files, loaded.skipped) == ([tmp_path / name], [])
    assert loaded.tasks == [
        Task(
            id=f"{Path(name).name}:{line} {record['id']}",
            problem=record["question"],
            answer=record["result"],
        )
        for line, record in enumerate(CALC_X, start=1)
    ]


def test_gsm8k(tmp_path: Path) -> None:
    write(tmp_path / "main/test-00000-of-00001.parquet", GSM8K)
    assert load(tmp_path, "test").tasks == [
        Task(id="test-00000-of-00001.parquet:1", problem=GSM8K[0]["question"], answer="10"),
        Task(id="test-00000-of-00001.parquet:2", problem=GSM8K[1]["question"], answer="1,200"),
    ]


def test_splits_and_files(tmp_path: Path) -> None:
    write(tmp_path / "data/test-00000-of-00002.parquet", CALC_X[:1])
    write(tmp_path / "data/test-00001-of-00002.parquet", CALC_X[1:])
    write(tmp_path / "train.jsonl", GSM8K)
    assert [task["answer"] for task in load(tmp_path, "test").tasks] == ["45/2", "B", "2,400"]
    assert [task["answer"] for task in load(tmp_path, "test", limit=2).tasks] == ["45/2", "B"]
    assert [task["answer"] for task in load(tmp_path, "train").tasks] == ["10", "1,200"]


def test_what_cannot_be_scored_is_left_out_and_said(tmp_path: Path) -> None:
    records = [
        CALC_X[0],
        {**CALC_X[0], "result": "see the figure"},
        {**CALC_X[0], "result": "23"},
        {"question": "How many?", "answer": "Nobody knows.\n#### many"},
    ]
    write(tmp_path / "train.jsonl", records)
    loaded = load(tmp_path, "train")
    assert [task["answer"] for task in loaded.tasks] == ["45/2"]
    assert loaded.skipped == [
        "train.jsonl:2: its result 'see the figure' is neither a number nor a choice",
        "train.jsonl:3: its chain ends with '45/2 = around 22.5', but its result is '23'",
        "train.jsonl:4: its answer 'many' is no number",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "train.jsonl:2 is not JSON: "),
        ("{}", "train.jsonl:2 has neither a field 'result' nor 'answer': neither Calc-X nor GSM8K"),
        (
            '{"answer": "#### 1"}',
            "train.jsonl:2 has no field 'question'; its fields: answer",
        ),
        (
            '{"question": 1, "answer": "#### 1"}',
            "train.jsonl:2: field 'question' is 1, not a text",
        ),
        (
            '{"question": "How many?", "answer": "1"}',
            "train.jsonl:2: field 'answer' has no #### before the number",
        ),
    ],
)
def test_malformed_records(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(f"{json.dumps(GSM8K[0])}\n{line}\n")
    with pytest.raises(DataError) as caught:
        load(tmp_path, "train")
    assert message in str(caught.value)


def test_a_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such folder"):
        load(tmp_path / "absent", "train")
    with pytest.raises(DataError, match=r"no file of the split train; one of train\.parquet, "):
        load(tmp_path, "train")
