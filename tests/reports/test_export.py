"""Test `lightspan export`, which writes the contents of store and learner as JSONL and Parquet."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from peft import PeftModel
from pyarrow import parquet
from transformers import AutoModelForCausalLM

import lightspan
from lightspan import LightningRL, LoRA, Trainer
from lightspan.cli import main
from lightspan.errors import ConfigError, DataError
from lightspan.lightning.rows import Row
from lightspan.lightning.selection import Rejection
from lightspan.progress import SilentReporter
from lightspan.schema.records import Mode
from lightspan.stores import open_store
from lightspan_tools.export import Filter, What, export_run


def exported(run: Path, what: What, **options: Any) -> list[dict[str, Any]]:
    stream = io.BytesIO()
    export_run(run, what, stream, **options)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_transitions_are_what_the_learner_was_given(
    one_step: tuple[Path, list[Row]],
) -> None:
    run, rows = one_step
    assert rows, "no group varied: change the seed of the test"
    found = {
        row["call_id"]: row for row in exported(run, "transitions") if row["verdict"] == "trained"
    }
    assert len(found) == 24
    for row in rows:
        for call_id, _ in row.call_ids:
            line = found[call_id]
            whole = line["prompt_ids"] + line["response_ids"]
            start = len(line["prompt_ids"])
            assert row.ids[: len(whole)] == whole
            assert row.advantages[start] == line["advantage"]
            assert row.weights[start] == line["token_weight"]
            assert row.logprobs[start : len(whole)] == line["logprobs"]
            assert row.versions[start : len(whole)] == line["versions"]
            assert line["agent_path"] == "writer"
            assert line["mode"] == "train"
            assert line["temperature"] == 1.0


@lightspan.rollout
def constant(task: dict[str, Any]) -> float:
    client = openai.OpenAI(base_url="http://localhost:9/v1", api_key="k")
    with client, lightspan.agent("writer"):
        message: Any = {"role": "user", "content": task["q"]}
        client.chat.completions.create(model="m", messages=[message], max_tokens=2)
    return 0.5


def test_a_call_of_a_group_without_variance_has_the_reason(tiny: Path, tmp_path: Path) -> None:
    """Its verdict is that of its class, and its reason says that no token of it was trained."""
    algorithm = LightningRL(tiny, group_size=2, tasks_per_step=1)
    trainer = Trainer(algorithm, steps=1, runners=1, folder=tmp_path, reporter=SilentReporter())
    trainer.fit(constant, [{"q": "a"}])
    whats: list[What] = ["transitions", "messages"]
    for what in whats:
        lines = exported(tmp_path, what)
        assert [(line["verdict"], line["reason"]) for line in lines] == 2 * [
            ("trained", "advantage 0: all rollouts of its group have the same reward")
        ]


@pytest.mark.parametrize("keeps_explanations", [False, True])
def test_no_call_of_a_step_that_has_not_ended_was_trained(
    one_step: tuple[Path, list[Row]], tmp_path: Path, keeps_explanations: bool
) -> None:
    run = tmp_path / "run"
    shutil.copytree(one_step[0], run)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["kind"] != "train"))
    if not keeps_explanations:
        shutil.rmtree(run / "explanations")
    found = [row for row in exported(run, "transitions") if row["mode"] == "train"]
    assert len(found) == 24
    assert {(row["verdict"], row["reason"]) for row in found} == {
        ("rejected", Rejection.UNUSED.text)
    }


def test_spans_are_those_of_the_store(one_step: tuple[Path, list[Row]]) -> None:
    run, _ = one_step

    async def stored() -> set[str]:
        async with open_store(run / "store.db") as store:
            attempts = [state.attempt_id or "" for state in await store.rollouts()]
            return {s.span_id for spans in (await store.spans(attempts)).values() for s in spans}

    lines = exported(run, "spans")
    assert {line["span_id"] for line in lines} == asyncio.run(stored())
    agents = [line for line in lines if line["kind"] == "agent" and line["mode"] == "train"]
    assert sorted({line["name"] for line in agents}) == [
        "invoke_agent checker",
        "invoke_agent writer",
    ]
    assert len(agents) == 24
    assert agents[0]["attributes"]["gen_ai.agent.name"] in ("writer", "checker")


def test_messages_are_conversations_with_the_answer_last(
    one_step: tuple[Path, list[Row]],
) -> None:
    run, _ = one_step
    lines = exported(run, "messages", only=Filter(mode=Mode.TRAIN, agents=("writer",)))
    assert len(lines) == 24
    assert {tuple(m["role"] for m in line["messages"]) for line in lines} == {
        ("user", "assistant"),
        ("user", "assistant", "user", "assistant"),
    }
    by_rollout = {(line["rollout_id"], len(line["messages"])): line for line in lines}
    for (rollout, length), line in by_rollout.items():
        if length == 4:
            assert line["messages"][:2] == by_rollout[rollout, 2]["messages"]
            assert line["messages"][2] == {"role": "user", "content": "more"}


def test_filters_and_what_they_leave_out(one_step: tuple[Path, list[Row]]) -> None:
    run, _ = one_step
    stream = io.BytesIO()
    only = Filter(agents=("checker",), min_reward=1.0)
    done = export_run(run, "messages", stream, only=only)
    lines = exported(run, "messages", only=Filter(agents=("checker",)))
    good = [line for line in lines if line["rollout_reward"] == 1.0]
    imitated = [line for line in good if line["rejection"] is None]
    assert good
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == imitated
    assert {line["rejection"] for line in good} <= {None, "cut off"}
    # 3 tasks x 4 members and an evaluation of 1 before and after
    assert (done.rows, done.rollouts) == (len(imitated), len(good))
    expected = {
        "calls cut off": len(good) - len(imitated),
        "calls of other agents": 2 * len(good),
        "rollouts of another mode or reward": 14 - len(good),
    }
    assert done.left_out == {reason: count for reason, count in expected.items() if count}
    text = done.text("messages", Path("x.jsonl"))
    counts = f"{len(imitated)} messages of {len(good)} rollouts"
    assert text.startswith(f"{counts} to x.jsonl; left out: ")


@pytest.mark.parametrize("what", ["spans", "transitions", "messages"])
def test_parquet_says_the_same(
    what: What, one_step: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    run, _ = one_step
    out = tmp_path / "out.parquet"
    done = export_run(run, what, out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600  # it holds what people asked
    from_parquet = parquet.read_table(out).to_pylist()
    lines = exported(run, what)
    assert len(from_parquet) == len(lines) == done.rows
    for row, line in zip(from_parquet, lines, strict=True):
        as_text = [k for k, v in row.items() if isinstance(v, str) and not isinstance(line[k], str)]
        restored = {k: json.loads(v) if k in as_text else v for k, v in row.items()}
        assert list(restored) == list(line)
        for key, value in line.items():
            if key == "logprobs":
                assert restored[key] == pytest.approx(value, rel=1e-6)
            else:
                assert restored[key] == value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet"]


def test_the_command(
    one_step: tuple[Path, list[Row]],
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    run, _ = one_step
    assert main(["export", str(run), "transitions", "--mode", "train", "--agent", "writer"]) == 0
    printed = capsysbinary.readouterr()
    assert len(printed.out.splitlines()) == 24
    assert printed.err.startswith(b"24 transitions of 12 rollouts; left out: ")
    out = tmp_path / "messages.jsonl"
    assert main(["export", str(run), "messages", "-o", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 42
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert main(["export", str(tmp_path), "spans"]) == 1
    assert b"is no run" in capsysbinary.readouterr().err


def test_the_model(
    one_step: tuple[Path, list[Row]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, _ = one_step
    out = tmp_path / "model"
    assert main(["export", str(run), "model", "-o", str(out)]) == 0
    assert (out / "model.safetensors").read_bytes() == (
        run / "model" / "model.safetensors"
    ).read_bytes()
    for more, problem in (
        (["-o", str(out)], f"{out} exists; a model goes into a new folder"),
        ([], "a model needs a folder: -o FOLDER"),
        (["-o", str(out / "x"), "--merge"], "no LoRA adapter: there is nothing to merge"),
        (["-o", str(out / "x"), "--policy", "other"], "the run has the policies policy: name one"),
    ):
        assert main(["export", str(run), "model", *more]) == 1
        assert problem in capsys.readouterr().err


def test_a_model_that_is_gone(
    one_step: tuple[Path, list[Row]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(one_step[0], run, ignore=shutil.ignore_patterns("model"))
    for more in ([], ["--merge"]):
        assert main(["export", str(run), "model", "-o", str(tmp_path / "x"), *more]) == 1
        assert capsys.readouterr().err == (
            f"lightspan: the run's model {run}/model is gone: put it back, or train again\n"
        )


@pytest.mark.parametrize(
    ("what", "option", "said"),
    [
        ("spans", ["--merge"], "--merge applies only to model"),
        ("spans", ["--agent", "x"], "--agent x applies only to transitions, messages"),
        (
            "model",
            ["--format", "parquet"],
            "--format parquet applies only to spans, transitions, messages, tasks",
        ),
    ],
)
def test_an_option_that_is_not_of_this_export_is_refused(
    what: str, option: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "runs/none", what, *option]) == 1
    assert capsys.readouterr().err == f"lightspan: {said}, not to {what}: leave it out\n"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft 0.21's
def test_a_lora_result_as_an_adapter_and_merged(tiny: Path, apps: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    algorithm = LightningRL(
        tiny, optimize="writer", frozen="base", group_size=2, tasks_per_step=1, lora=LoRA(rank=2)
    )
    Trainer(algorithm, steps=1, folder=run, reporter=SilentReporter()).fit(apps.two, [{"q": "a"}])
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert main(["export", str(run), "model", "-o", str(adapter)]) == 0
    assert main(["export", str(run), "model", "--merge", "-o", str(merged)]) == 0
    ids = torch.tensor([[5, 6, 7, 8]])
    base = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        from_adapter = PeftModel.from_pretrained(base, str(adapter))(ids).logits
        from_merged = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
    torch.testing.assert_close(from_merged, from_adapter, rtol=1e-4, atol=1e-5)
    assert (merged / "tokenizer.json").is_file()


def test_what_is_no_file_is_not_replaced(one_step: tuple[Path, list[Row]], tmp_path: Path) -> None:
    """As root, `-o /dev/null` would replace the device otherwise, for the whole machine."""
    run, _ = one_step
    whole, target, link = (tmp_path / name for name in ("whole", "target", "link"))
    export_run(run, "spans", whole)
    target.write_bytes(b"old")
    link.symlink_to(target)
    export_run(run, "spans", link)
    assert link.is_symlink()
    assert target.read_bytes() == whole.read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        export_run(run, "spans", pipe)
        assert read.result() == whole.read_bytes()
    assert pipe.is_fifo()
    with pytest.raises(DataError, match="Parquet needs a regular file"):
        export_run(run, "spans", pipe, format="parquet")
    with target.open("wb") as stream:
        export_run(run, "spans", Path(f"/dev/fd/{stream.fileno()}"))
        assert target.read_bytes() == whole.read_bytes()


def test_bad_outputs(one_step: tuple[Path, list[Row]], tmp_path: Path) -> None:
    run, _ = one_step
    with pytest.raises(ConfigError, match="Parquet needs a file"):
        export_run(run, "spans", io.BytesIO(), format="parquet")
    with pytest.raises(DataError, match="cannot be written: No such file or directory"):
        export_run(run, "spans", tmp_path / "no" / "folder.jsonl")
    if Path("/dev/full").exists():
        program = [sys.executable, "-m", "lightspan.cli", "export", str(run), "spans"]
        with open("/dev/full", "wb") as full:
            done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1
        assert done.stderr == (
            "lightspan: the output cannot be written: No space left on device\n"
            "see docs/troubleshooting.md#cannot-be-written\n"
        )
