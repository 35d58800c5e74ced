"""What is computed once for several prompts or rows with images, and what is never shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.errors import ConfigError, UnsupportedError
from lightspan.lightning.rows import Response
from lightspan.protocols.engine import GenerationRequest
from lightspan.protocols.learner import Critic, LoRA, Optimizer, SFTLoss
from lightspan.schema.token_records import Sampling
from lightspan_testing.engine_suite import generate
from lightspan_testing.image_suite import Prompt, generate_seen
from lightspan_testing.learner_suite import make_image_rows, reference_loss
from lightspan_testing.learner_suite.base import BOTH_CLIPS
from lightspan_testing.learner_suite.reference import row_logits
from lightspan_testing.tiny import tiny_model
from lightspan_testing.tiny_vision import (
    VISION_FAMILIES,
    VisionFamily,
    image_chat,
    picture,
    tiny_vision_model,
)
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.policy_model import merge_adapter
from lightspan_torch.learner.torch import TorchLearner
from lightspan_torch.vision import features
from lightspan_torch.vision.features import CachedImage, Vision
from lightspan_torch.vision.tokenizer import VisionTokenizer
from packages.torch.tests.learner.gradients import assert_close, gradients


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_vision_model(tmp_path_factory.mktemp("vision") / "model", seed=6, hidden=32)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> VisionTokenizer:
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, VisionTokenizer)
    return loaded


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each image that is encoded is added; the cache is empty at first."""
    monkeypatch.setattr(features, "_CACHE", features._Cache(features.CACHE_BYTES))
    digests: list[str] = []
    encode = Vision.encode

    def note(self: Vision, images: Sequence[CachedImage]) -> Any:
        digests.extend(image.digest for image in images)
        return encode(self, images)

    monkeypatch.setattr(Vision, "encode", note)
    return digests


async def computed_tokens(engine: TransformersEngine, prompts: list[Prompt]) -> list[int]:
    """Answer prompts one after another; return how many tokens of each prompt were computed."""
    batcher = engine._workers["reader"]._batcher
    assert batcher is not None
    counts = []
    step = batcher._step
    for prompt in prompts:
        passes: list[int] = []

        def note(chunks: Any, passes: list[int] = passes) -> None:
            passes.append(sum(chunks.values()))
            step(chunks)

        batcher._step = note  # type: ignore[method-assign]
        await generate_seen(engine, prompt, max_tokens=1)
        counts.append(sum(passes))
    return counts


async def test_equal_images_share_and_others_do_not(
    folder: Path, tokenizer: VisionTokenizer, encoded: list[str]
) -> None:
    """Prompts of equal ids: the second image is another one, then the first is another one."""
    red, blue = picture(), picture("blue")
    prompts = [
        tokenizer.render_images(image_chat(*pair, "?"))
        for pair in ((red, blue), (red, blue), (red, red), (blue, blue))
    ]
    ids, (first, second) = prompts[0]
    assert all(each[0] == ids for each in prompts)
    engine = TransformersEngine({"reader": folder}, seed=0)
    await engine.start()
    await generate(engine, [5], policy="reader", max_tokens=1)
    counts = await computed_tokens(engine, prompts)
    await engine.close()
    whole = len(ids)
    shared = [0, (whole - 1) // 4 * 4, second.start // 4 * 4, first.start // 4 * 4]
    assert counts == [whole - each for each in shared]
    # each image once, though it is in several prompts
    assert [encoded.count(image.digest) for image in (first, second)] == [1, 1]


def test_changed_weights_have_a_name_of_their_own() -> None:
    """A model that is gone gives its `id` to the next one, and its features are in the cache."""

    def changed() -> str:
        vision = Vision(None, None)  # type: ignore[arg-type]
        vision.forget()
        return vision.weights

    assert len({changed() for _ in range(100)}) == 100


async def test_a_group_and_its_learner_encode_an_image_once(
    folder: Path, tokenizer: VisionTokenizer, encoded: list[str]
) -> None:
    """Eight calls, scores and two updates of the text part use the same features."""
    engine = TransformersEngine({"reader": folder}, seed=0)
    learner = TorchLearner({"reader": folder}, optimizer=Optimizer(learning_rate=1e-2))
    await engine.start()
    ids, images = tokenizer.render_images(image_chat(picture(), "what?"))
    rows = []
    for number in range(8):
        answer = await generate_seen(engine, (ids, images), request_id=str(number))
        row = make_image_rows(load_model(folder), tokenizer, policy="reader")[0]
        size, own = len(ids), len(answer.ids)
        rows.append(
            replace(
                row,
                rollout_id=f"ro-{number}",
                ids=[*ids, *answer.ids],
                images=images,
                mask=[False] * size + [True] * own,
                advantages=[0.0] * size + [1.0] * own,
                weights=[0.0] * size + [0.1] * own,
                logprobs=[0.0] * size + answer.logprobs,
                versions=[0] * (size + own),
                temperatures=[1.0] * (size + own),
            )
        )
    scores = learner.score(rows)
    for row, score in zip(rows, scores, strict=True):
        assert score[len(ids) :] == pytest.approx(row.logprobs[len(ids) :], abs=1e-5)
    for _ in range(2):
        learner.update(rows, SFTLoss())
    await learner.publish(engine, {"reader": 1})
    answer = await generate_seen(engine, (ids, images))
    await engine.close()
    assert encoded.count(images[0].digest) == 1
    size, own = len(ids), len(answer.ids)
    again = replace(
        rows[0],
        ids=[*ids, *answer.ids],
        mask=[False] * size + [True] * own,
        advantages=[0.0] * (size + own),
        weights=[0.0] * (size + own),
        logprobs=[0.0] * (size + own),
        versions=[1] * (size + own),
        temperatures=[1.0] * (size + own),
    )
    assert learner.score([again])[0][size:] == pytest.approx(answer.logprobs, abs=1e-5)


async def test_a_small_cache_changes_nothing(
    folder: Path, tokenizer: VisionTokenizer, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that were dropped are encoded again, and get other numbers."""
    monkeypatch.setattr(features, "_CACHE", features._Cache(1))
    rows = make_image_rows(load_model(folder), tokenizer)
    expected = TorchLearner({"writer": folder}).score(rows)
    assert len(encoded) > 3
    assert TorchLearner({"writer": folder}).score(rows) == expected
    assert len(features._CACHE._images) == 1


OPTIONS: dict[str, dict[str, Any]] = {
    "text": {},
    "vision": {"train_vision": True},
    "lora": {"lora": LoRA(rank=2)},
    "pieces": {"token_budget": 8},
    "vision in pieces": {"train_vision": True, "token_budget": 8},
    "alone": {"share_prefixes": False},
}


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gradients_are_those_of_autograd(
    tmp_path: Path, family: VisionFamily, options: dict[str, Any]
) -> None:
    folder = tiny_vision_model(tmp_path, seed=2, family=family, hidden=32)
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, VisionTokenizer)
    rows = make_image_rows(load_model(folder), tokenizer)
    learner = TorchLearner({"writer": folder}, optimizer=Optimizer(learning_rate=1e-2), **options)
    if "lora" in options:  # a new adapter has no gradient in one of its matrices
        learner.update(rows, SFTLoss())
    _, found = gradients(learner, rows, BOTH_CLIPS)
    model = learner._models["writer"].plain
    reference_loss(model, rows, BOTH_CLIPS).backward()  # type: ignore[no-untyped-call]
    parameters = learner._steppers["writer"]._parameters
    expected = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in parameters.items()
    }
    assert_close(found, expected)
    names = {name for name, _ in features.vision_parameters(model)}
    trained = {name for name in names if model.get_parameter(name).requires_grad}
    assert trained == (names if "train_vision" in options else set())


def test_lora_is_exported_with_the_image_processor(
    folder: Path, tokenizer: VisionTokenizer, tmp_path: Path
) -> None:
    """An adapter, the model that it is merged into, and a merged export have equal scores."""
    rows = make_image_rows(load_model(folder), tokenizer)
    options = {"optimizer": Optimizer(learning_rate=1e-2), "lora": LoRA(rank=2)}
    learner = TorchLearner({"writer": folder}, **options)  # type: ignore[arg-type]
    learner.update(rows, SFTLoss())
    learner.export("writer", tmp_path / "adapter")
    learner.export("writer", tmp_path / "merged", merge=True)
    merge_adapter(tmp_path / "adapter", tmp_path / "again")
    expected = learner.score(rows)
    for name in ("merged", "again"):
        assert (tmp_path / name / "preprocessor_config.json").is_file()
        for found, wanted in zip(
            TorchLearner({"writer": tmp_path / name}).score(rows), expected, strict=True
        ):
            assert found == pytest.approx(wanted, abs=1e-5)


def test_lora_and_the_vision_part(folder: Path) -> None:
    with pytest.raises(ConfigError, match="train_vision"):
        TorchLearner({"writer": folder}, lora=LoRA(), train_vision=True)


async def test_a_model_without_sight_names_why(
    folder: Path, tokenizer: VisionTokenizer, tmp_path: Path
) -> None:
    text = tiny_model(tmp_path / "text", seed=1)
    _, images = tokenizer.render_images(image_chat(picture()))
    engine = TransformersEngine({"reader": text})
    await engine.start()
    assert engine.capabilities.images == ()
    request = GenerationRequest(
        request_id="r", policy="reader", prompt_ids=[5], images=images, sampling=Sampling()
    )
    with pytest.raises(UnsupportedError, match="takes none: it is of the type qwen2, and images"):
        async for _ in engine.generate(request, stream=False):
            pass
    await engine.close()
    row = make_image_rows(load_model(folder), tokenizer)[0]
    with pytest.raises(UnsupportedError, match="policy writer have images, and it takes none"):
        TorchLearner({"writer": text}).score([row])


async def test_without_its_image_processor_a_model_answers_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_vision_model(tmp_path, seed=1)
    (folder / "preprocessor_config.json").unlink()
    engine = TransformersEngine({"writer": folder})
    assert "images are refused: cannot load the image processor" in caplog.text
    assert engine.capabilities.images == ()
    await engine.start()
    assert (await generate(engine, [5, 6, 7])).ids
    await engine.close()


def test_a_wrong_path_is_refused_with_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Positions that are indices are wrong for Qwen2.5-VL, and the check at loading says so."""
    folder = tiny_vision_model(tmp_path, seed=1)
    monkeypatch.setattr(Vision, "_positions", lambda self, ids, images: None)
    engine = TransformersEngine({"writer": folder})
    assert engine.capabilities.images == ()
    assert "its logits after an image differ by" in caplog.text
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, VisionTokenizer)
    row = make_image_rows(load_model(folder), tokenizer)[0]
    with pytest.raises(UnsupportedError, match="differ by"):
        TorchLearner({"writer": folder}).score([row])


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_values_are_of_the_states_after_the_images(tmp_path: Path, family: VisionFamily) -> None:
    """A critic reads the hidden state before each call, also where ids are equal."""
    folder = tiny_vision_model(tmp_path, seed=2, family=family, hidden=32)
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, VisionTokenizer)
    model = load_model(folder)
    rows = []
    for row in make_image_rows(model, tokenizer):
        start = len(row.ids) - 3
        rows.append(replace(row, responses=(Response(start, 3),)))
    states: list[Any] = []
    hook = model.get_decoder().register_forward_hook(
        lambda module, inputs, output: states.append(output.last_hidden_state[0])
    )
    with torch.no_grad():
        for row in rows:
            row_logits(model, row)
    hook.remove()
    weight = torch.linspace(-1, 1, 32)
    expected = [
        float(state[row.responses[0].start - 1] @ weight)
        for row, state in zip(rows, states, strict=True)
    ]
    for options in ({}, {"token_budget": 1}, {"share_prefixes": False}):
        learner = TorchLearner({"writer": folder}, critic=Critic(), **options)  # type: ignore[arg-type]
        learner._heads["writer"]._weight = weight
        assert [value for [value] in learner.values(rows)] == pytest.approx(expected, abs=1e-4)
    assert rows[0].ids == rows[2].ids
    assert abs(expected[0] - expected[2]) > 1e-3
