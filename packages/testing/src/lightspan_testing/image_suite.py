"""Conformance tests of engines that take images: subclass `ImageEngineSuite`.

    class TestMyEngineWithImages(ImageEngineSuite):
        family = "qwen2_5_vl"

        def make_engine(self, models):
            return MyEngine(models)

Results are compared with plain forward passes of a tiny vision model
(`lightspan_testing.tiny_vision`), whose images are prepared by transformers' image processor. Needs
pytest, pytest-asyncio (`asyncio_mode = "auto"`), torch, transformers and Pillow. No test depends on
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.errors import LightspanError
from lightspan.protocols.engine import GenerationRequest, ImageTokenizer, TokenEngine
from lightspan.schema.images import PromptImage
from lightspan.schema.token_records import Sampling
from lightspan_testing.engine_suite import TOLERANCE, Answer, of_tokens, perturbed, with_weights
from lightspan_testing.tiny_vision import (
    VisionFamily,
    image_chat,
    image_logits,
    picture,
    tiny_vision_model,
)
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model

Prompt = tuple[list[int], tuple[PromptImage, ...]]
"""The ids of a prompt and its images."""


@torch.no_grad()
def image_reference(
    model: Any, prompt: Prompt, answer: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Return the log-probability of each token of an answer to a prompt with images.

    A placeholder that was sampled stands for no image.
    """
    ids, images = prompt
    logits = image_logits(model, [*ids, *answer], images)
    distribution = (logits[len(ids) - 1 : -1] / temperature).log_softmax(-1)
    return of_tokens(distribution, answer)


async def generate_seen(
    engine: TokenEngine, prompt: Prompt, *, request_id: str = "r", **sampling: Any
) -> Answer:
    """Generate an answer to a prompt with images, to the end."""
    request = GenerationRequest(
        request_id=request_id,
        policy="reader",
        prompt_ids=prompt[0],
        images=prompt[1],
        sampling=Sampling(**{"max_tokens": 12, **sampling}),
    )
    answer = Answer()
    async for chunk in engine.generate(request, stream=False):
        answer.ids += chunk.ids
        answer.logprobs += chunk.logprobs
        answer.versions += [chunk.version] * len(chunk.ids)
        answer.finish = chunk.finish_reason
    return answer


class ImageEngineSuite:
    """Tests of an engine that takes images; the module's docstring shows how to subclass it."""

    family: VisionFamily = "qwen2_5_vl"
    tolerance = TOLERANCE

    def make_engine(self, models: Mapping[str, Path]) -> TokenEngine:
        """Return an unstarted engine that serves `models` (policy name → folder)."""
        raise NotImplementedError

    def other(self, folder: Path, model: Any, seed: int) -> tuple[Any, Any]:
        """Return random weights for an update, and a model that has these weights."""
        weights = perturbed(model, seed)
        return weights, with_weights(folder, weights)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        torch.set_num_threads(1)
        folder = tmp_path_factory.mktemp("vision") / "model"
        return tiny_vision_model(folder, seed=5, family=cls.family)

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, folder: Path) -> Any:
        return load_model(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls, folder: Path) -> ImageTokenizer:
        tokenizer = load_tokenizer(folder)
        assert isinstance(tokenizer, ImageTokenizer)
        return tokenizer

    @asynccontextmanager
    async def running(self, folder: Path) -> AsyncIterator[TokenEngine]:
        engine = self.make_engine({"reader": folder})
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    @pytest.fixture
    async def engine(self, folder: Path) -> AsyncIterator[TokenEngine]:
        async with self.running(folder) as engine:
            yield engine

    def expect(
        self,
        answer: Answer,
        model: Any,
        prompt: Prompt,
        version: int = 0,
        temperature: float = 1.0,
    ) -> None:
        """Check the versions and log-probabilities of an answer to a prompt with images."""
        assert answer.versions == [version] * len(answer.ids)
        expected = image_reference(model, prompt, answer.ids, temperature)
        assert answer.logprobs == pytest.approx(expected, abs=self.tolerance)

    async def test_the_policy_is_declared_to_see(self, engine: TokenEngine) -> None:
        assert engine.capabilities.images == ("reader",)
        assert isinstance(engine.tokenizer("reader"), ImageTokenizer)

    async def test_logprobs_of_prompts_with_images(
        self, engine: TokenEngine, model: Any, tokenizer: ImageTokenizer
    ) -> None:
        """Log-probabilities are exact in concurrent calls with none to three images each."""
        colours = ("red", "blue", "green", "black")
        prompts = []
        for number in range(16):
            parts: list[bytes | str] = ["Look. "]
            for place in range(number % 4):
                size = (84, 56) if (number + place) % 2 else (56, 84)
                parts += [picture(colours[(number + place) % 3], size), " and "]
            prompts.append(tokenizer.render_images(image_chat(*parts, "what?")))
        calls = [
            generate_seen(engine, each, request_id=f"r{n}", temperature=0.5 + n / 16)
            for n, each in enumerate(prompts)
        ]
        for number, answer in enumerate(await asyncio.gather(*calls)):
            self.expect(answer, model, prompts[number], temperature=0.5 + number / 16)

    async def test_equal_ids_and_other_images(
        self, engine: TokenEngine, model: Any, tokenizer: ImageTokenizer
    ) -> None:
        """Prompts of equal ids share nothing from their first other image on."""
        prompts = [
            tokenizer.render_images(image_chat("See ", picture(first), picture(second), "?"))
            for first in ("red", "blue")
            for second in ("red", "blue")
        ]
        assert len({tuple(ids) for ids, _ in prompts}) == 1
        for _ in range(2):  # the second time, all of them are in a cache
            calls = [
                generate_seen(engine, each, request_id=str(number))
                for number, each in enumerate([*prompts, *prompts])
            ]
            for prompt, answer in zip(2 * prompts, await asyncio.gather(*calls), strict=True):
                self.expect(answer, model, prompt)

    async def test_a_turn_after_an_image(
        self, engine: TokenEngine, model: Any, tokenizer: ImageTokenizer
    ) -> None:
        """A prompt that continues an answer, with one more image, is exact."""
        ids, images = tokenizer.render_images(image_chat(picture(), "?"))
        first = await generate_seen(engine, (ids, images))
        more, further = tokenizer.render_images(image_chat("And ", picture("blue"), "?"))
        moved = [
            PromptImage(
                digest=image.digest,
                grid=image.grid,
                start=image.start + len(ids) + len(first.ids),
                length=image.length,
                first=image.first,
                data=image.data,
            )
            for image in further
        ]
        prompt = [*ids, *first.ids, *more], (*images, *moved)
        self.expect(await generate_seen(engine, prompt), model, prompt)

    async def test_the_same_prompt_after_an_update(
        self, engine: TokenEngine, folder: Path, model: Any, tokenizer: ImageTokenizer
    ) -> None:
        """Neither pages nor features that the former weights computed are used."""
        prompt = tokenizer.render_images(image_chat(picture(), "what?"))
        self.expect(await generate_seen(engine, prompt), model, prompt)
        weights, moved = self.other(folder, model, seed=3)
        await engine.update("reader", weights, 1)
        self.expect(await generate_seen(engine, prompt), moved, prompt, version=1)

    async def test_an_update_during_calls(
        self, engine: TokenEngine, folder: Path, model: Any, tokenizer: ImageTokenizer
    ) -> None:
        """Each token of a call has the log-probability of the weights that sampled it."""
        prompts = [
            tokenizer.render_images(image_chat(picture(colour), "what?"))
            for colour in ("red", "blue", "green")
        ]
        calls = [
            asyncio.create_task(generate_seen(engine, each, request_id=str(number), max_tokens=60))
            for number, each in enumerate(3 * prompts)
        ]
        await asyncio.sleep(0.05)
        weights, moved = self.other(folder, model, seed=4)
        models = [model, moved]
        await engine.update("reader", weights, 1)
        for prompt, answer in zip(3 * prompts, await asyncio.gather(*calls), strict=True):
            by_version = [image_reference(each, prompt, answer.ids) for each in models]
            expected = [by_version[v][place] for place, v in enumerate(answer.versions)]
            assert answer.versions == sorted(answer.versions)
            assert answer.logprobs == pytest.approx(expected, abs=self.tolerance)

    async def test_images_that_do_not_fit_are_refused(
        self, engine: TokenEngine, model: Any, tokenizer: ImageTokenizer
    ) -> None:
        """What is wrong is named, and other calls go on."""
        ids, images = tokenizer.render_images(image_chat(picture(), "what?"))
        [other, *_] = tokenizer.render_images(image_chat(picture("blue"), "what?"))[1]
        first = images[0]

        def but(**changes: Any) -> tuple[PromptImage, ...]:
            values = {name: getattr(first, name) for name in first.__struct_fields__}
            return (PromptImage(**{**values, **changes}), *images[1:])

        wrong = [
            (but(data=b""), "missing"),
            (but(data=other.data), "missing or others"),
            (but(grid=(first.grid[0] + 1, first.grid[1])), "grid"),
            (but(start=first.start + 1), "placeholder"),
            (but(first=1000), "placeholders"),
        ]
        for changed, message in wrong:
            with pytest.raises(LightspanError, match=message):
                await generate_seen(engine, (ids, changed))
        prompt = ids, images
        self.expect(await generate_seen(engine, prompt), model, prompt)
