"""Test SFT: an answer is memorised, and stored episodes are imitated by their exact token ids."""

from __future__ import annotations

import enum
import io
import json
import math
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import lightspan
from lightspan import SFT, LoRA, Optimizer, Preferences, Torch, Trainer
from lightspan.errors import CheckpointError, ConfigError, DataError, ModelError, UnknownAgentError
from lightspan.lightning.episode import build_episode
from lightspan.lightning.rows import Row
from lightspan.progress import PlainReporter, SilentReporter
from lightspan.schema.records import Mode
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from lightspan_testing.tiny_vision import image_chat, picture, tiny_vision_model
from lightspan_tools.export import Filter, export_store
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.learner.torch import TorchLearner
from lightspan_torch.sft.algorithm import Demonstration, demonstrations_from
from lightspan_torch.sft.chat_dataset import load_chats
from packages.core.tests.published import published_template

QUIET = SilentReporter()


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


CHATS = [_chat("capital?", "Rome"), _chat("colour?", "red")]


def _greedy(model: Path, question: str) -> str:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    made = loaded.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    return str(tokenizer.decode(made[0, ids.shape[1] :]))


def test_memorised_answers_come_back_greedily(tiny: Path, tmp_path: Path) -> None:
    sft = SFT(tiny, learning_rate=3e-3, batch_size=2, epochs=40)
    result = sft.fit(CHATS, tmp_path / "model", reporter=QUIET)
    assert len(result.losses) == 40
    assert result.losses[-1] < 0.05 < 1.0 < result.losses[0]
    assert result.seconds > 0
    assert _greedy(result.model, "capital?") == "Rome<|im_end|>"
    assert _greedy(result.model, "colour?") == "red<|im_end|>"


def test_chats_of_a_file(tiny: Path, tmp_path: Path, updates: list[list[Row]]) -> None:
    """Check lines with and without `messages`, blank lines, and a byte order mark."""
    path = tmp_path / "chats.jsonl"
    lines = [json.dumps(CHATS[0]), "", json.dumps(CHATS[1]["messages"])]
    path.write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")
    for number, given in enumerate((CHATS, path, str(path))):
        SFT(tiny).fit(given, tmp_path / str(number), reporter=QUIET)
    listed, *read = [[(row.ids, row.mask) for row in rows] for rows in updates]
    assert read == [listed, listed]
    path.write_text(json.dumps(CHATS[1]["messages"]))
    assert SFT(tiny).fit(path, tmp_path / "one", reporter=QUIET).demonstrations == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"^demonstrations: .*chats.jsonl cannot be read: No such file or directory$"),
        ("{}\n{", r"chats.jsonl, line 2 is not JSON; each line must be one chat: "),
        (json.dumps(CHATS), r"chats.jsonl is one list of 2: a file has a chat on each line; give"),
    ],
)
def test_files_that_hold_no_chats(
    tiny: Path, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "chats.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        SFT(tiny).fit(path, tmp_path / "model", reporter=QUIET)


class Stopped(SilentReporter):
    """A reporter that sends SIGINT after a number of updates, and stores the summary."""

    def __init__(self, after: int) -> None:
        self.after, self.said = after, ""

    def advance(self, count: int = 1, **values: float | str) -> None:
        self.after -= count
        if self.after == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def finish(self, summary: str = "") -> None:
        self.said = summary


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_an_interrupted_run_goes_on_to_the_same_weights(
    tiny: Path, tmp_path: Path, lora: LoRA | None
) -> None:
    options: dict[str, Any] = {"learning_rate": 3e-3, "batch_size": 1, "epochs": 3, "lora": lora}
    whole = SFT(tiny, **options).fit(CHATS, tmp_path / "whole", reporter=QUIET)
    target, reporter = tmp_path / "model", Stopped(after=2)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            SFT(tiny, **options).fit(CHATS, target, reporter=reporter)
    finally:
        signal.signal(signal.SIGINT, handler)
    kept = tmp_path / "model.unfinished"
    assert reporter.said == (
        f"interrupted after 2 of 6 updates, saved in {kept}: continue with fit(…, resume=True)"
    )
    with pytest.raises(ConfigError, match="was made with other settings or examples"):
        SFT(tiny, **options).fit(CHATS[:1], target, reporter=QUIET, resume=True)
    changed = {**options, "learner": Torch(dtype="float64")}
    with pytest.raises(ConfigError, match="was made with other settings or examples"):
        SFT(tiny, **changed).fit(CHATS, target, reporter=QUIET, resume=True)
    gone_on = SFT(tiny, **options).fit(CHATS, target, reporter=QUIET, resume=True)
    assert gone_on.losses == whole.losses
    weights = [(path / "model.safetensors").read_bytes() for path in (whole.model, target)]
    assert weights[0] == weights[1]
    assert not kept.exists()
    (kept / "learner").mkdir(parents=True)
    (kept / "done.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*model.unfinished"):
        SFT(tiny, **options).fit(CHATS, target, reporter=QUIET, resume=True)


class Recording(TorchLearner):
    """A learner that stores the rows of each update."""

    updates: list[list[Row]]

    def update(self, rows: Any, loss: Any, **more: Any) -> dict[str, float]:
        type(self).updates.append(list(rows))
        return super().update(rows, loss, **more)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[list[Row]]:
    """Return the list of the rows of each update of SFT's learner."""
    Recording.updates = []
    monkeypatch.setattr("lightspan_torch.learner.torch.TorchLearner", Recording)
    return Recording.updates


def test_answers_are_weighted_by_tokens_and_prompts_not_at_all(
    tiny: Path, tmp_path: Path, updates: list[list[Row]]
) -> None:
    tokenizer = load_tokenizer(tiny)
    SFT(tiny, batch_size=2).fit(CHATS, tmp_path / "model", reporter=QUIET)
    [rows] = updates
    [end] = tokenizer.encode("<|im_end|>")
    expected = []
    for chat in CHATS:
        prompt = tokenizer.render(chat["messages"][:1])
        answer = [*tokenizer.encode(chat["messages"][1]["content"]), end]
        expected.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    assert sorted((row.ids, row.mask) for row in rows) == sorted(expected)
    answers = sum(sum(row.mask) for row in rows)
    assert {weight for row in rows for weight in row.weights} == {0.0, 1 / answers}


def test_prompt_weight_counts_prompts_in_part(
    tiny: Path, tmp_path: Path, updates: list[list[Row]]
) -> None:
    demo = Demonstration(prompt_ids=[5, 6, 7], response_ids=[8, 2])
    sft = SFT(tiny, prompt_weight=0.25)
    sft.fit([demo], tmp_path / "model", reporter=QUIET)
    [[row]] = updates
    assert row.ids == [5, 6, 7, 8, 2]
    assert row.mask == [False, True, True, True, True]
    assert row.weights == [0.0, 0.1, 0.1, 0.4, 0.4]  # of 2 · 0.25 + 2 · 1


def test_loss_is_the_mean_over_the_answers_tokens(tiny: Path, tmp_path: Path) -> None:
    demo = Demonstration(prompt_ids=[5, 6, 7], response_ids=[8, 2])
    learner = TorchLearner({"policy": str(tiny)})
    [scores] = learner.score(SFT(tiny)._rows([demo]))
    result = SFT(tiny).fit([demo], tmp_path / "model", reporter=QUIET)
    assert result.losses == [pytest.approx(-(scores[3] + scores[4]) / 2, rel=1e-5)]


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "capital?"},
    {"role": "assistant", "content": "Rome"},
    {"role": "user", "content": "colour?"},
    {"role": "assistant", "content": "red"},
]


def test_all_turns_are_imitated_as_if_each_were_a_chat(
    tiny: Path, tmp_path: Path, updates: list[list[Row]]
) -> None:
    """Check that loss and weights are equal, although common tokens are computed only once."""
    whole = SFT(tiny, learning_rate=1e-3, batch_size=2, turns="all")
    first = whole.fit([{"messages": TURNS}], tmp_path / "whole", reporter=QUIET)
    parts = SFT(tiny, learning_rate=1e-3, batch_size=2)
    second = parts.fit([TURNS[:2], TURNS], tmp_path / "parts", reporter=QUIET)
    assert first.losses == [pytest.approx(second.losses[0], rel=1e-5)]
    [[row], [one, two]] = updates
    longest, shortest = sorted((one, two), key=lambda each: -len(each.ids))
    assert row.ids == longest.ids
    padding = [False] * (len(row.ids) - len(shortest.ids))
    masks = zip(longest.mask, [*shortest.mask, *padding], strict=True)
    assert row.mask == [a or b for a, b in masks]
    answers = sum(longest.mask) + sum(shortest.mask)
    assert {weight for weight in row.weights if weight} == {1 / answers}
    models = [AutoModelForCausalLM.from_pretrained(each.model) for each in (first, second)]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


WEIGHTED = [
    {"role": "user", "content": "capital?"},
    {"role": "assistant", "content": "Oslo", "weight": 0},
    *TURNS[2:],
    {"role": "user", "content": "sound?"},
    {"role": "assistant", "content": "loud", "weight": 1},
]


@pytest.mark.parametrize(
    ("messages", "alike", "left_out"),
    [
        (WEIGHTED, WEIGHTED[1:], {"with weight 0": 1}),
        ([*WEIGHTED, *WEIGHTED[:2]], WEIGHTED[1:], {"with weight 0": 2}),
        ([TURNS[0], {"role": "assistant", "content": ""}, *TURNS], TURNS, {"without an answer": 1}),
    ],
    ids=["the first", "the last", "empty"],
)
def test_answers_of_weight_0_and_empty_ones_are_left_out(
    messages: list[Any],
    alike: list[Any],
    left_out: dict[str, int],
    tiny: Path,
    tmp_path: Path,
    updates: list[list[Row]],
) -> None:
    """Check that the same tokens are imitated as in a chat where such an answer has no prompt."""
    sft = SFT(tiny, turns="all")
    result = sft.fit([{"messages": messages}], tmp_path / "model", reporter=QUIET)
    assert (result.demonstrations, result.left_out) == (1, left_out)
    sft.fit([alike], tmp_path / "alike", reporter=QUIET)
    [[row], [expected]] = updates
    assert _imitated(row) == _imitated(expected)


def _imitated(row: Row) -> list[int]:
    return [token for token, is_imitated in zip(row.ids, row.mask, strict=True) if is_imitated]


@pytest.mark.parametrize("content", ["", None, []])
def test_a_last_answer_that_is_empty_or_of_weight_0_leaves_the_chat_out(
    content: Any, tiny: Path, tmp_path: Path
) -> None:
    empty = [TURNS[0], {"role": "assistant", "content": content}]
    zero = [*TURNS, TURNS[0], {"role": "assistant", "content": "Oslo", "weight": 0}]
    result = SFT(tiny).fit([empty, TURNS, zero], tmp_path / "model", reporter=QUIET)
    assert result.demonstrations == 1
    assert result.left_out == {"without an answer": 1, "with weight 0": 1}
    with pytest.raises(DataError, match="left out: 1 without an answer"):
        SFT(tiny).fit([empty], tmp_path / "none", reporter=QUIET)


def test_earlier_answers_count_in_full_beside_the_prompts_weight(
    tiny: Path, tmp_path: Path, updates: list[list[Row]]
) -> None:
    demo = Demonstration(prompt_ids=[5, 6, 7, 9], response_ids=[8], earlier=[(2, 3)])
    SFT(tiny, prompt_weight=0.25).fit([demo], tmp_path / "model", reporter=QUIET)
    [[row]] = updates
    assert row.weights == [0.0, 0.1, 0.4, 0.1, 0.4]  # of 2 · 0.25 + 2 · 1


def _with_template(model: Path, folder: Path, template: str) -> Path:
    """Return a copy of the model with another chat template."""
    shutil.copytree(model, folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_a_template_that_changes_what_was_said_cannot_imitate_all_turns(
    tiny: Path, tmp_path: Path
) -> None:
    """Check a template that changes an earlier answer, like those that remove its thinking."""
    model = _with_template(
        tiny,
        tmp_path / "forgetful",
        "{% for m in messages %}{{ m.role }}:"
        "{{ m.content if loop.last or m.role == 'user' else 'said' }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    )
    assert SFT(model).fit([TURNS], tmp_path / "last", reporter=QUIET).demonstrations == 1
    message = r'\[0\]: the chat template renders messages\[1\] .* give turns="last"'
    with pytest.raises(DataError, match=message):
        SFT(model, turns="all").fit([TURNS], tmp_path / "all", reporter=QUIET)


def test_thoughts_are_imitated_or_counted(
    tiny: Path, tmp_path: Path, updates: list[list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Check a template with a place for thoughts, which trims them, and one without."""
    model = _with_template(
        tiny,
        tmp_path / "thinking",
        "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content | trim }}</think>{% endif %}{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    )
    chat = [TURNS[0], {**TURNS[1], "reasoning_content": " It is  so. \n"}, *TURNS[2:]]
    result = SFT(model, turns="all").fit([chat], tmp_path / "with", reporter=QUIET)
    assert (result.demonstrations, result.left_out) == (1, {})
    [[row]] = updates
    assert "<think>It is  so.</think>" in load_tokenizer(model).decode(_imitated(row))
    lost = {"thoughts that the chat template has no place for": 1}
    result = SFT(tiny, turns="all").fit([chat], tmp_path / "without", reporter=PlainReporter())
    assert (result.demonstrations, result.left_out) == (1, lost)
    assert "1 of 1 demonstrations; left out: 1 thoughts that the" in capsys.readouterr().out


@pytest.mark.parametrize("turns", ["last", "all"])
def test_an_answer_ends_where_sampling_does(
    tiny: Path, tmp_path: Path, updates: list[list[Row]], turns: Any
) -> None:
    """Check templates that add further end-of-turn tokens after the last answer."""
    model = _with_template(
        tiny,
        tmp_path / "talkative",
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt else '<|im_end|><|im_end|>' }}",
    )
    SFT(model, turns=turns).fit([TURNS], tmp_path / "model", reporter=QUIET)
    [[row]] = updates
    [end] = load_tokenizer(tiny).encode("<|im_end|>")
    assert row.ids.count(end) == 4
    assert [i for i, token in zip(row.ids, row.mask, strict=True) if token].count(end) == (
        1 if turns == "last" else 2
    )


# --- from stored episodes -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tiny: Path, apps: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one step and return its store."""
    from lightspan import LightningRL

    folder = tmp_path_factory.mktemp("stored") / "run"
    algorithm = LightningRL(tiny, optimize="writer", frozen="base", group_size=4, tasks_per_step=2)
    trainer = Trainer(algorithm, steps=1, folder=folder, reporter=QUIET)
    trainer.fit(apps.two, [{"q": "a"}, {"q": "b"}])
    return folder / "store.db"


def test_stored_episodes_above_a_reward_are_imitated_by_their_exact_ids(
    stored: Path, tiny: Path, tmp_path: Path, updates: list[list[Row]]
) -> None:
    episodes = stored_episodes(stored, mode=Mode.TRAIN)
    assert len(episodes) == 8
    rewards = sorted({e.reward for e in episodes if e.reward is not None})
    least = rewards[len(rewards) // 2]
    demonstrations = demonstrations_from(episodes, min_reward=least, optimize="writer")
    expected = {
        (tuple(call.record.prompt_ids), tuple(call.record.response_ids))
        for episode in episodes
        if episode.reward is not None and episode.reward >= least
        for call in episode.calls
        if call.agent == "writer" and call.record is not None
    }
    assert {(tuple(d.prompt_ids), tuple(d.response_ids)) for d in demonstrations} == expected
    assert 0 < len(demonstrations) < 8
    SFT(tiny).fit(demonstrations, tmp_path / "model", reporter=QUIET)
    trained = {tuple(row.ids) for rows in updates for row in rows}
    assert trained == {prompt + answer for prompt, answer in expected}


def test_every_agent_and_a_filter_of_ones_own(stored: Path) -> None:
    episodes = stored_episodes(stored)
    both = demonstrations_from(episodes, min_reward=0.0)
    assert len(both) == 16
    first = episodes[0].rollout_id
    one = demonstrations_from(episodes, min_reward=0.0, keep=lambda e: e.rollout_id == first)
    assert len(one) == 2
    assert demonstrations_from(episodes, min_reward=2.0) == []


def test_an_answer_under_a_grammar_is_imitated_as_it_stands(
    tiny: Path, tmp_path: Path, updates: list[list[Row]]
) -> None:
    """Check that tokens that the grammar forced are imitated too, for any grammar library."""
    record = make_record("c", (7, 8), (9, 10), grammar="start: X", grammar_library="another")
    episode = build_episode(make_attempt(), make_rollout(), [], [record])
    demonstrations = demonstrations_from([episode], min_reward=1.0)
    SFT(tiny).fit(demonstrations, tmp_path / "model", reporter=QUIET)
    assert [(row.ids, row.constraints) for [row] in updates] == [([7, 8, 9, 10], ())]


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "examples"),
    [
        (SFT, CHATS),
        (Preferences, [{**chat, "label": place == 0} for place, chat in enumerate(CHATS)]),
    ],
)
@pytest.mark.parametrize(
    ("weight", "message"),
    [(math.nan, "the loss of update 1 is nan"), (1e25, "the norm of the gradient of update 1 is")],
)
def test_damaged_weights_end_in_an_error(
    tiny: Path, tmp_path: Path, algorithm: Any, examples: list[Any], weight: float, message: str
) -> None:
    """The loss of a weight that is too large is finite, and its gradient is not."""
    damaged = shutil.copytree(tiny, tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"][0] = weight
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        algorithm(damaged).fit(examples, tmp_path / "model", reporter=QUIET)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("demo", "message"),
    [
        ({"messages": []}, r"demonstrations\[1\] must end with a message of the assistant"),
        ([{"role": "assistant", "content": "a"}], r"\[1\] answers nothing: a message has to come"),
        (
            [TURNS[0], {**TURNS[1], "weight": 0.5}],
            r"\[1\]: messages\[1\] has the weight 0.5; an answer .* may have 0 \(left out\) or 1",
        ),
        ([{**TURNS[0], "weight": 1}, TURNS[1]], r"\[1\]: messages\[0\] has the weight 1; .* none"),
        ({"question": "a"}, r'demonstrations\[1\] must be \{"messages": \[…\]\}, not'),
        (Demonstration(prompt_ids=[], response_ids=[1]), r"\[1\] needs a prompt and an answer"),
        (
            Demonstration(prompt_ids=[1, 2], response_ids=[2], earlier=[(0, 1)]),
            r"\[1\].earlier: \[0, 1\) is not within its prompt of 2 tokens, or begins",
        ),
    ],
)
def test_demonstrations_that_cannot_be_imitated(
    tiny: Path, tmp_path: Path, demo: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        SFT(tiny).fit([CHATS[0], demo], tmp_path / "model", reporter=QUIET)
    assert not (tmp_path / "model").exists()


def test_what_the_model_cannot_read_is_left_out(tiny: Path, tmp_path: Path) -> None:
    """Check chats that are too long, with an image, and of a role that the template refuses."""
    image = [{"type": "image_url", "image_url": {"url": "https://a.test/b.png"}}]
    chats: list[Any] = [
        CHATS[0],
        Demonstration(prompt_ids=[1] * 512, response_ids=[2]),
        [{"role": "user", "content": image}, {"role": "assistant", "content": "A cat."}],
        [{"role": "user", "content": "\ud83e"}, {"role": "assistant", "content": "!"}],
        [{"role": "zebra", "content": "?"}, {"role": "assistant", "content": "!"}],
    ]
    reporter = Lines()
    result = SFT(tiny).fit(chats, tmp_path / "model", reporter=reporter)
    assert (result.demonstrations, result.left_out) == (1, {"not for this model": 4})
    assert "1 of 5 demonstrations; left out: 4 not for this model" in reporter.lines[0]
    assert "zebra" in reporter.lines[0]
    with pytest.raises(DataError, match=r"no demonstration to imitate.*has 513 tokens.*holds 512"):
        SFT(tiny).fit(chats[1:2], tmp_path / "none", reporter=QUIET)
    with pytest.raises(DataError, match=r"half of a surrogate pair, '\\ud83e', .* remove the half"):
        SFT(tiny).fit(chats[3:4], tmp_path / "none", reporter=QUIET)


class Role(str, enum.Enum):  # noqa: UP042
    """Roles of a framework whose text is not their value."""

    SYSTEM = "system"


ARGUMENTS = {"sql": "SELECT 1"}


@pytest.mark.parametrize("source", ["chats", "store"])
def test_chats_have_the_form_that_the_gateway_renders(
    tiny: Path, tmp_path: Path, updates: list[list[Row]], source: str
) -> None:
    """Check a developer's message, an enum as role, parts of text, and arguments as text."""
    function = {"name": "execute", "arguments": json.dumps(ARGUMENTS)}
    call = {"id": "c", "type": "function", "function": function}
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "?"}]
    chat: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": Role.SYSTEM, "content": "Be kind."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": parts[:1]},
        {"role": "assistant", "content": "Yes."},
    ]
    model = _with_template(tiny, tmp_path / "qwen", published_template("qwen2_5"))
    if source == "store":
        url = f"sqlite:{tmp_path / 'production.db'}"
        with (
            ScriptedServer("Yes.") as server,
            openai.OpenAI(base_url=server.url, api_key="k") as client,
            lightspan.record(url),
        ):
            client.chat.completions.create(model="m", messages=chat[:-1])
        SFT(model, from_store=url).fit(folder=tmp_path / "model", reporter=QUIET)
    else:
        SFT(model).fit([chat], tmp_path / "model", reporter=QUIET)
    [[row]] = updates
    text = load_tokenizer(model).decode(row.ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "execute", "arguments": {"sql": "SELECT 1"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nOne\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>"
    )


class _Dataset(list[Any]):
    """A stand-in for a `Dataset` of Hugging Face, which is not installed."""

    __module__ = "datasets.arrow_dataset"


def _with_tools(question: str, arguments: Any, properties: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    parameters = {"type": "object", "properties": properties}
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
    }


def test_nulls_that_arrow_adds_are_not_imitated(
    tiny: Path, tmp_path: Path, updates: list[list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Arrow gives each row of a column of structs the keys of all rows."""
    model = _with_template(tiny, tmp_path / "qwen", published_template("qwen2_5"))
    number, text = {"type": "integer"}, {"type": "string"}
    chats = [_with_tools("1", {"a": 1}, {"a": number}), _with_tools("2", {"b": ""}, {"b": text})]
    merged = [
        _with_tools("1", {"a": 1, "b": None}, {"a": number, "b": None}),
        _with_tools("2", {"a": None, "b": ""}, {"a": None, "b": text}),
    ]
    SFT(model).fit(chats, tmp_path / "list", reporter=QUIET)
    SFT(model).fit(_Dataset(merged), tmp_path / "dataset")
    assert "keys of the Dataset's rows whose value is null are left out" in capsys.readouterr().out
    rows, same = updates
    assert [row.ids for row in same] == [row.ids for row in rows]
    with pytest.raises(DataError, match=r"demonstrations\[0\]: the tools' parameter 'b' is null"):
        SFT(model).fit(merged, tmp_path / "rows", reporter=QUIET)


def test_tables_and_tools_that_are_no_list(tiny: Path, tmp_path: Path) -> None:
    frame: Any = type("DataFrame", (), {"iloc": None})()
    with pytest.raises(DataError, match=r"is a table: give its rows, data.to_dict\('records'\)"):
        SFT(tiny).fit(frame, tmp_path / "model", reporter=QUIET)
    with pytest.raises(DataError, match=r"demonstrations\[0\]: tools=nan must be a list, or None"):
        SFT(tiny).fit([{**CHATS[0], "tools": float("nan")}], tmp_path / "model", reporter=QUIET)


def test_an_answer_ends_where_the_template_writes_no_end(
    tiny: Path, tmp_path: Path, updates: list[list[Row]]
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    model = _with_template(tiny, tmp_path / "endless", template)
    SFT(model).fit([CHATS[0]], tmp_path / "model", reporter=QUIET)
    [[row]] = updates
    assert row.ids[-1] in load_tokenizer(model).eos_ids
    assert row.mask[-1]
    with pytest.raises(DataError, match='give turns="last"'):
        SFT(model, turns="all").fit([TURNS], tmp_path / "all", reporter=QUIET)


class Lines(SilentReporter):
    """A reporter that stores its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"epochs": 0}, "epochs=0 must be a finite number above 0"),
        ({"prompt_weight": 2}, "prompt_weight=2 must be a finite number at least 0 and at most 1"),
        ({"turns": "every"}, "turns='every' must be one of last, all"),
        ({"turns": "all", "from_store": "s.db"}, "a store's calls are imitated one by one"),
        ({"lora": 8}, r"lora=8: use LoRA\(rank=8\)"),
        ({"min_reward": 0.5}, "min_reward=0.5 selects from a store: give from_store= too"),
        ({"service": "a", "agents": "b"}, "service='a', agents='b' selects from a store"),
        (
            {"learning_rate": 1e-3, "optimizer": Optimizer()},
            "give learning_rate or optimizer, not both",
        ),
    ],
)
def test_impossible_settings(tiny: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SFT(tiny, **options)


@pytest.mark.parametrize("algorithm", [SFT, Preferences])
def test_the_learners_device_comes_first(tiny: Path, tmp_path: Path, algorithm: Any) -> None:
    examples = [
        {**_chat("hello", answer), "label": label} for answer, label in (("a", True), ("b", False))
    ]
    with pytest.raises(ConfigError, match="cuda:99"):
        algorithm(tiny, learner=Torch(device="cuda:99")).fit(examples, tmp_path / "model")


# --- from production ------------------------------------------------------------------------
def _recorded(url: str, server: ScriptedServer) -> list[str]:
    """Record two questions to two agents and one that is too long; return the attempt ids."""
    ids = []
    with (
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        lightspan.record(url, service="desk"),
    ):
        for question in ("capital?", "colour?", "long " * 5000):
            with lightspan.operation("ask"):
                for agent in ("answerer", "checker"):
                    asked: Any = [{"role": "user", "content": question}]
                    with lightspan.agent(agent):
                        client.chat.completions.create(model="m", messages=asked)
                ids.append(str(lightspan.current_attempt_id()))
    return ids


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store with three attempts: one with good feedback, one with bad, one too long."""
    url = f"sqlite:{tmp_path_factory.mktemp('production') / 'production.db'}"
    said = {"capital?": "Rome", "colour?": "red"}
    with ScriptedServer(lambda request: said.get(request.last_text, "too long")) as server:
        liked, disliked, long = _recorded(url, server)
    lightspan.feedback(liked, 0.9, store=url)
    lightspan.feedback(disliked, 0.1, store=url)
    lightspan.feedback(long, 1.0, store=url)
    return url


def test_what_production_did_well_is_memorised(tiny: Path, tmp_path: Path, production: str) -> None:
    sft = SFT(
        tiny,
        learning_rate=3e-3,
        batch_size=2,
        epochs=60,
        from_store=production,
        min_reward=0.8,
        service="desk",
        agents="answerer",
    )
    result = sft.fit(folder=tmp_path / "model", reporter=QUIET)
    assert result.demonstrations == 1
    assert result.left_out == {
        "of other agents": 3,
        "scored too low": 1,
        "not for this model": 1,
    }
    assert _greedy(result.model, "capital?") == "Rome<|im_end|>"


def test_a_failed_try_of_an_agent_is_not_imitated(tmp_path: Path, tiny: Path) -> None:
    """The app repeated the agent, so the reward is that of its last answer."""
    url, answers = f"sqlite:{tmp_path / 'retried.db'}", iter(["BROKEN", "42"])
    with (
        ScriptedServer(lambda request: next(answers)) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        lightspan.record(url, service="desk"),
        lightspan.operation("ask"),
    ):
        for _ in range(2):
            with suppress(ValueError), lightspan.agent("parser"):
                asked: Any = [{"role": "user", "content": "how many?"}]
                reply = client.chat.completions.create(model="m", messages=asked)
                int(reply.choices[0].message.content or "")
        lightspan.emit_reward(1.0)
    chats = load_chats(url, min_reward=0.5)
    assert [chat["messages"][-1]["content"] for chat in chats.chats] == ["42"]
    assert chats.left_out == {"in failed tries": 1}
    out = io.BytesIO()
    done = export_store(url, "messages", out, only=Filter(min_reward=0.5))
    assert [
        json.loads(line)["messages"][-1]["content"] for line in out.getvalue().splitlines()
    ] == ["42"]
    assert done.left_out == {"calls in failed tries": 1}


def test_an_agent_that_no_call_has_is_named(
    tiny: Path, tmp_path: Path, production: str, lines: Any
) -> None:
    sft = SFT(tiny, from_store=production, agents=["answerer", "chekcer"], learning_rate=1e-3)
    sft.fit(folder=tmp_path / "model", reporter=lines)
    assert any(
        line.startswith("agents=: no agent matches 'chekcer'. Did you mean 'checker'?")
        for line in lines.texts
    )
    out = tmp_path / "chats.jsonl"
    only = Filter(agents=("answerer", "chekcer"))
    text = export_store(production, "messages", out, only=only).text("messages", out)
    assert "; no agent matches 'chekcer'. Did you mean 'checker'?" in text
    before = out.read_bytes()
    with pytest.raises(UnknownAgentError, match="Did you mean 'checker'"):
        export_store(production, "messages", out, only=Filter(agents=("chekcer",)))
    assert out.read_bytes() == before


def test_the_store_of_a_training_is_refused_with_the_remedy(
    stored: Path, tiny: Path, tmp_path: Path
) -> None:
    sft = SFT(tiny, from_store=f"sqlite:{stored}", min_reward=0.5)
    with pytest.raises(DataError, match=r"that of a training, .* lightspan export RUN messages"):
        sft.fit(folder=tmp_path / "model", reporter=QUIET)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "hm"}, {"type": "tool_use", "name": "look"}],
            },
            "tool_use",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "sent"}],
            },
            "tool_result",
        ),
    ],
)
def test_calls_of_tools_in_another_form_are_refused(
    tiny: Path, tmp_path: Path, message: Any, kind: str
) -> None:
    """They would be dropped, and only the text beside them imitated."""
    chat = [{"role": "user", "content": "Where?"}, message, {"role": "assistant", "content": "hm"}]
    chat = chat[: 2 if message["role"] == "assistant" else 3]
    with pytest.raises(DataError, match=f"of type '{kind}': give calls of tools .* OpenAI's chats"):
        SFT(tiny).fit([{"messages": chat}], tmp_path / "model", reporter=QUIET)


def test_demonstrations_come_from_one_place(tiny: Path, tmp_path: Path, production: str) -> None:
    with pytest.raises(ConfigError, match="give one"):
        SFT(tiny, from_store=production).fit(CHATS, tmp_path / "model")
    with pytest.raises(ConfigError, match="give one"):
        SFT(tiny).fit(folder=tmp_path / "model")
    with pytest.raises(ConfigError, match="needs a folder"):
        SFT(tiny).fit(CHATS)


@pytest.mark.parametrize("stored", [True, False])
def test_recorded_images_are_imitated_if_the_store_has_them(tmp_path: Path, stored: bool) -> None:
    """A recorded chat refers to its image by digest, and the store has the bytes."""
    url, model = f"sqlite:{tmp_path / 'seen.db'}", tiny_vision_model(tmp_path / "tiny", seed=1)
    with (
        ScriptedServer("red") as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        lightspan.record(url, images=stored),
        lightspan.operation("ask"),
    ):
        asked: Any = image_chat(picture(), "colour?")
        client.chat.completions.create(model="m", messages=asked)
    sft = SFT(model, learning_rate=3e-3, epochs=2, from_store=url)
    if not stored:
        with pytest.raises(DataError, match="1 with images, sounds or files, of which references"):
            sft.fit(folder=tmp_path / "model", reporter=QUIET)
        return
    chats = load_chats(url).chats
    assert chats == [
        {"messages": [*asked, {"role": "assistant", "content": "red"}]},
    ]
    result = sft.fit(folder=tmp_path / "model", reporter=QUIET)
    assert (result.demonstrations, result.left_out) == (1, {})
