"""Run the suite of engines that take images with real vLLM servers, in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan.errors import ConfigError
from lightspan.lightning.rows import Row
from lightspan.protocols.engine import ImageTokenizer, TokenEngine
from lightspan_testing.engine_suite import low_rank
from lightspan_testing.image_suite import ImageEngineSuite, generate_seen, image_reference
from lightspan_testing.lora_suite import RANK, merged
from lightspan_testing.tiny_vision import VisionFamily, image_chat, picture, tiny_vision_model
from lightspan_torch.vision.features import vision_parameters
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.requirements import FLAGS, flags_of
from lightspan_vllm.weights import ServerSpec
from tests.vllm_servers.conftest import TOLERANCE, Start
from tests.vllm_servers.scripts import LATEST_S, lines_of, steps_of, training

STEPS = 5

pytestmark = pytest.mark.timeout(900)


def saved_model(folder: Path, family: VisionFamily, *, tied: bool = False) -> Path:
    """Build a model that vLLM's kernels can compute, which need heads of size 32."""
    return tiny_vision_model(folder, seed=5, family=family, hidden=128, tied=tied)


class TestQwen25(ImageEngineSuite):
    """Whole weights, with tied embeddings as in Qwen2.5-VL-3B."""

    family: VisionFamily = "qwen2_5_vl"
    tolerance = TOLERANCE
    tied = True
    lora: Mapping[str, int] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return saved_model(tmp_path_factory.mktemp("vision") / "model", cls.family, tied=cls.tied)

    @pytest.fixture(scope="class")
    @classmethod
    def address(cls, start_vision: Start, folder: Path) -> str:
        spec = ServerSpec.of(folder, dtype="float32", context=None)
        rank = max(cls.lora.values(), default=0)
        spec = ServerSpec(**{**vars(spec), "lora_rank": rank, "loras": len(cls.lora)})
        return start_vision(model=folder, flags=flags_of(spec))

    @pytest.fixture(autouse=True)
    def _server(self, address: str, tmp_path: Path) -> None:
        self.addresses, self.logs = (address,), tmp_path

    def make_engine(self, models: Mapping[str, Path]) -> TokenEngine:
        return VLLMEngine(VLLM(addresses=self.addresses), models, lora=self.lora, logs=self.logs)

    async def test_the_check_of_weights_has_the_images(
        self, engine: TokenEngine, folder: Path, model: Any, tokenizer: ImageTokenizer
    ) -> None:
        """After an update, the recent prompts are compared with their images."""
        assert isinstance(engine, VLLMEngine)
        prompt = tokenizer.render_images(image_chat(picture(), "what?"))
        await generate_seen(engine, prompt)
        weights, moved = self.other(folder, model, seed=6)
        await engine.update("reader", weights, 1)
        scored: list[Row] = []

        async def score(rows: Sequence[Row]) -> list[list[float]]:
            scored.extend(rows)
            (row,) = rows
            start = len(prompt[0])
            return [[0.0] * start + image_reference(moved, prompt, row.ids[start:])]

        await engine.check_weights("reader", 1, score)
        assert [row.images for row in scored] == [prompt[1]]


class TestQwen3(TestQwen25):
    family = "qwen3_vl"
    tied = False


class TestSmolVLM(TestQwen3):
    family = "smolvlm"


def test_a_training_of_agents_that_see(python: str, tmp_path: Path) -> None:
    """Both policies of one server look at images, and learner and server see the same ones."""
    model = saved_model(tmp_path / "model", "qwen2_5_vl", tied=True)
    folder = tmp_path / "run"
    script = Path(__file__).parents[1] / "apps" / "train_vllm.py"
    with training(script, folder, model, python, STEPS, "--lora", "--images") as process:
        process.wait(LATEST_S)
    assert process.returncode == 0, folder.with_suffix(".log").read_text()[-4000:]
    assert steps_of(folder) == STEPS
    evaluations = [line["mean"] for line in lines_of(folder) if line["kind"] == "eval"]
    assert evaluations[-1] > evaluations[0] + 0.05
    gap = "learner/logprob_gap_max"
    assert max(line[gap] for line in lines_of(folder) if gap in line) < 10 * TOLERANCE


class TestLoRA(TestQwen25):
    """LoRA of the text part."""

    lora: Mapping[str, int] = {"reader": RANK}

    def other(self, folder: Path, model: Any, seed: int) -> tuple[Any, Any]:
        both = low_rank(model, seed)
        vision = {name.removesuffix(".weight") for name, _ in vision_parameters(model)}
        text = {name: pair for name, pair in both.layers.items() if name not in vision}
        weights = msgspec.structs.replace(both, layers=text)
        return weights, merged(folder, weights)


class TestLoRAOfQwen3(TestLoRA):
    family = "qwen3_vl"
    tied = False


class TestLoRAOfSmolVLM(TestLoRAOfQwen3):
    family = "smolvlm"


async def test_missing_flags_for_images_are_named(start_vision: Start, tmp_path: Path) -> None:
    """Check what a server without the flags says of itself."""
    folder = saved_model(tmp_path / "model", "qwen2_5_vl", tied=True)
    # beside the loop of the test: `start_vision` has one of its own
    address = await asyncio.to_thread(start_vision, model=folder, flags=FLAGS)
    engine = VLLMEngine(VLLM(addresses=(address,)), {"reader": folder}, logs=tmp_path)
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    for flag in (
        "--enable-scale-out",
        "--no-mm-device-do-normalize",
        '--hf-overrides \'{"tie_word_embeddings": false, '
        '"text_config": {"tie_word_embeddings": false}}\'',
    ):
        assert flag in str(caught.value)
