"""Preferences on answers to images: two images of equal size have equal token ids."""

from __future__ import annotations

import io
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import openai
import PIL.Image
import pytest
import torch

import lightspan
from lightspan import LLM, LightningRL, Trainer
from lightspan.algorithms.recorded_attempts import Query
from lightspan.errors import DataError
from lightspan.progress import SilentReporter
from lightspan.schema.images import Image
from lightspan.training.folder import RunFolder
from lightspan_testing.image_suite import image_reference
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.tiny_vision import image_chat, picture, tiny_vision_model
from lightspan_torch import Preferences
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.torch import TorchLearner
from lightspan_torch.preferences.examples import (
    Rated,
    contradictions,
    mismatched,
    pairs_of,
    prompt_identity,
    reversed_pairs,
    split,
    verdicts_of,
)
from lightspan_torch.preferences.objectives import Answer, Answers
from lightspan_torch.preferences.rated_calls import load_rated_calls
from lightspan_torch.sft.rendering import Demonstration, render_demonstration

QUIET = SilentReporter()
COLOURS = ("red", "blue")


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def asked(colour: str) -> list[dict[str, Any]]:
    return image_chat(picture(colour), "Which?")


PAIRS = [
    {"messages": asked("red"), "chosen": answer("query"), "rejected": answer("singer")},
    {"messages": asked("blue"), "chosen": answer("singer"), "rejected": answer("query")},
]
VERDICTS = [
    {"messages": [*asked(colour), answer(text)], "label": (colour == "red") == (text == "query")}
    for colour in COLOURS
    for text in ("query", "singer")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_vision_model(tmp_path_factory.mktemp("model") / "tiny", seed=1, hidden=32)


def rendered(model: Path, colour: str, text: str) -> Demonstration:
    chat = {"messages": [*asked(colour), answer(text)]}
    demo = render_demonstration(chat, load_tokenizer(model), "chat", "last", Counter())
    assert demo is not None
    return demo


def logprob(model: Path, colour: str, text: str) -> float:
    """Return the log-probability of an answer by transformers' own code."""
    demo = rendered(model, colour, text)
    loaded = load_model(model)
    return sum(image_reference(loaded, (demo.prompt_ids, demo.images), demo.response_ids))


@pytest.mark.parametrize(("examples", "loss"), [(PAIRS, "dpo"), (VERDICTS, "kto")])
def test_each_image_gets_its_own_better_answer(
    model: Path, tmp_path: Path, examples: list[Any], loss: str
) -> None:
    """Check opposite preferences: without the images they would cancel out."""
    preferences = Preferences(model, learning_rate=1e-2, batch_size=4, epochs=25, held_out=0)
    result = preferences.fit(examples, tmp_path / "tuned", reporter=QUIET)
    assert (result.check.loss, result.check.contradictory, result.left_out) == (loss, 0, {})

    def margin(folder: Path, colour: str) -> float:
        return logprob(folder, colour, "query") - logprob(folder, colour, "singer")

    assert abs(margin(model, "red") - margin(model, "blue")) < 1
    assert margin(result.model, "red") > margin(model, "red") + 1
    assert margin(result.model, "blue") < margin(model, "blue") - 1


def test_log_probabilities_are_those_of_transformers(model: Path) -> None:
    learner = TorchLearner({"policy": str(model)})
    demos = [rendered(model, colour, text) for colour in COLOURS for text in ("query", "loud")]
    answers = [
        Answer(tuple(demo.prompt_ids), tuple(demo.response_ids), demo.images) for demo in demos
    ]
    found = Answers(learner, answers)._logprobs(answers)
    loaded = load_model(model)
    expected = [
        sum(image_reference(loaded, (demo.prompt_ids, demo.images), demo.response_ids))
        for demo in demos
    ]
    assert found == pytest.approx(expected, abs=1e-4)
    assert abs(found[0] - found[2]) > 1e-3  # equal ids, other images


def test_prompts_are_compared_by_their_images(model: Path) -> None:
    """Two prompts of equal ids are two prompts: for pairs, contradictions, KTO and held-out."""
    demos = {(c, t): rendered(model, c, t) for c in COLOURS for t in ("query", "singer")}
    red, blue = demos["red", "query"], demos["blue", "query"]
    assert red.prompt_ids == blue.prompt_ids
    assert prompt_identity(red) != prompt_identity(blue)
    assert len(prompt_identity(red)) == len(red.prompt_ids)
    bare = msgspec.structs.replace(red, images=())
    assert prompt_identity(bare) == tuple(red.prompt_ids)
    likes = {("red", "query"), ("blue", "singer")}
    rated = Rated(answers=[(demo, float(key in likes)) for key, demo in demos.items()])
    pairs = pairs_of(rated)
    assert [(pair.images[0].digest, pair.chosen_ids == red.response_ids) for pair in pairs] == [
        (red.images[0].digest, True),
        (blue.images[0].digest, False),
    ]
    assert rated.left_out == {}
    verdicts = verdicts_of(rated, 0.5)
    assert (contradictions(verdicts), reversed_pairs(pairs)) == (0, 0)
    assert [verdict.images for verdict in verdicts] == [demo.images for demo in demos.values()]
    others = mismatched(verdicts[::2], 100, seed=0)
    assert others == [blue.response_ids, red.response_ids]
    train, held_out = split([prompt_identity(verdict) for verdict in verdicts], 0.5, seed=0)
    assert sorted((train, held_out)) == [[0, 1], [2, 3]]


def test_pairs_of_token_ids_keep_their_images(model: Path) -> None:
    """Check `Pair`, written to JSON and read again, and `Verdict`; without images it is refused."""
    demos = [rendered(model, "red", text) for text in ("query", "singer")]
    rated, tokenizer = Rated(answers=[(demos[0], 1.0), (demos[1], 0.0)]), load_tokenizer(model)
    [pair] = pairs_of(rated)
    again = msgspec.json.decode(msgspec.json.encode(pair), type=type(pair))
    passed = Rated()
    passed.add_passed([again, *verdicts_of(rated, 0.5)], tokenizer)
    assert passed.pairs == [pair]
    assert [demo for demo, _ in passed.answers] == demos
    with pytest.raises(DataError, match=r"examples\[0\] has placeholders of images"):
        passed.add_passed([msgspec.structs.replace(pair, images=())], tokenizer)


@pytest.mark.parametrize("form", ["Pillow", "bytes", "datasets"])
def test_images_in_a_column_of_their_own(model: Path, form: str) -> None:
    """Check TRL's form: parts without bytes stand for the images of the row."""

    def image(colour: str) -> Any:
        if form == "Pillow":
            return PIL.Image.open(io.BytesIO(picture(colour)))
        return picture(colour) if form == "bytes" else {"bytes": picture(colour), "path": None}

    tokenizer = load_tokenizer(model)
    place = {"type": "image", "text": None} if form == "datasets" else {"type": "image"}
    content = [place, {"type": "text", "text": "Which?"}]
    rows = [
        {
            "images": [image(colour)],
            "prompt": [{"role": "user", "content": content}],
            "chosen": [answer("query")],
            "rejected": [answer("singer")],
        }
        for colour in COLOURS
    ]
    rated = Rated()
    rated.add_passed(rows, tokenizer)
    expected = [rendered(model, colour, "query") for colour in COLOURS]
    assert [pair.prompt_ids for pair in rated.pairs] == [demo.prompt_ids for demo in expected]
    pixels = [
        [PIL.Image.open(io.BytesIO(each.images[0].data)).tobytes() for each in some]
        for some in (rated.pairs, expected)
    ]
    assert pixels[0] == pixels[1]
    chat = {"messages": [*rows[0]["prompt"], answer("query")], "image": image("red")}
    demo = render_demonstration(chat, tokenizer, "chat", "last", Counter())
    assert demo is not None
    assert demo.prompt_ids == expected[0].prompt_ids
    with pytest.raises(DataError, match=r"\[0\]: its messages have 1 parts .* of images has 2"):
        rated.add_passed([{**rows[0], "images": [image("red")] * 2}], tokenizer)
    with pytest.raises(DataError, match=r"\[0\].images\[0\] must be an image of Pillow .* not str"):
        rated.add_passed([{**rows[0], "images": ["red.png"]}], tokenizer)


def test_answers_of_production_with_images(model: Path, tmp_path: Path) -> None:
    """Check liked and disliked answers to two images, of which one was not kept."""
    texts = iter(["query", "singer", "query"])
    url, ids = f"sqlite:{tmp_path / 'app.db'}", []
    with (
        ScriptedServer(lambda request: next(texts)) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
    ):
        for colour, kept in (("red", True), ("red", True), ("blue", False)):
            messages: Any = asked(colour)
            with lightspan.record(url, images=kept):
                ids.append(client.chat.completions.create(model="m", messages=messages).id)
    for identifier, value in zip(ids, (1.0, 0.0, 1.0), strict=True):
        lightspan.feedback(identifier, value, store=url)
    preferences = Preferences(model, from_store=url, loss="dpo", epochs=2, held_out=0)
    result = preferences.fit(folder=tmp_path / "tuned", reporter=QUIET)
    assert (result.check.desirable, result.left_out) == (
        1,
        {"with images, sounds or files, of which references are kept": 1},
    )


def look(task: dict[str, Any], llm: LLM) -> float:
    """Answer by an image; a text that begins with an early letter is a good one."""
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        messages: Any = asked(task["colour"])
        reply = client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
    text = (reply.choices[0].message.content or "").strip()
    return float(text[:1] < "m")


@pytest.mark.slow
def test_calls_of_a_training_with_their_images(model: Path, tmp_path: Path) -> None:
    """Check the exact ids and images of a run's store; a lost image is counted."""
    run = tmp_path / "run"
    trainer = Trainer(
        LightningRL(model, group_size=4, tasks_per_step=2), steps=1, folder=run, reporter=QUIET
    )
    trainer.fit(look, [{"colour": colour} for colour in COLOURS])
    url = RunFolder(run).store_url
    rated = load_rated_calls(url, Query(), [])
    demos = [call.answer for call in rated.calls]
    assert len(demos) == 8
    digests = {Image.of(picture(colour), "image/png").digest: colour for colour in COLOURS}
    for demo in demos:
        [image] = demo.images
        assert image.data == picture(digests[image.digest])
        assert demo.prompt_ids == rendered(model, digests[image.digest], "query").prompt_ids
    assert {digests[demo.images[0].digest] for demo in demos} == set(COLOURS)
    preferences = Preferences(model, from_store=url, loss="kto", threshold=0.0, held_out=0)
    assert preferences.check(reporter=QUIET).desirable == 8
    delete = f"DELETE FROM images WHERE digest = '{demos[0].images[0].digest}'"
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        connection.execute(delete)
    left = load_rated_calls(url, Query(), []).left_out
    assert left["whose images are not kept"] == 4
