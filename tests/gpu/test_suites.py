"""The suites of engines and learners on the device that LIGHTSPAN_DEVICE names, in two data types.

`benchmarks/gpu.py` runs them; without the variable the device is a GPU if there is one. What is
expected is computed on the CPU in float32. In float32 the suites are unchanged.

**Tolerances in bfloat16** come from plain forward passes in bfloat16 on the same device, of the
same models, when the tests run: an engine or a learner may be twice as far from float32 as those
are. Tests whose result rounding may turn (which token is the likeliest, equality of two
ways to compute a step) are replaced by others, or left to float32; they are listed below.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.lightning.rows import Row
from lightspan.protocols.engine import TokenEngine
from lightspan.protocols.learner import PolicyLoss, SFTLoss
from lightspan_testing.engine_suite import (
    EngineSuite,
    generate,
    low_rank,
    of_tokens,
    perturbed,
    reference,
    with_weights,
)
from lightspan_testing.learner_suite import (
    BOTH_CLIPS,
    LearnerSuite,
    distance,
    make_branching_rows,
    make_rows,
    published,
    reference_loss,
    token_logprobs,
)
from lightspan_testing.learner_suite.base import SGD_LIKE
from lightspan_testing.learner_suite.reference import reference_optimizer, take_step, weights_of
from lightspan_testing.lora_suite import LoRAEngineSuite, merged
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.torch import TorchLearner

DEVICE = os.environ.get("LIGHTSPAN_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
MARGIN = 2.0
"""How many times as far from float32 as a plain forward pass in bfloat16 a result may be."""
COLDEST = 0.5
"""The lowest temperature of the suites, at which log-probabilities differ most."""
EXACT = (
    *("resume", "exactly", "apart", "untrained_tokens", "notice_its_critic", "has_its_own"),
    *("scale_the_gradient", "an_exported_model"),
)
"""Parts of the names of tests that compare two computations to the last bit."""


@pytest.fixture(autouse=True)
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let torch compute in a fixed order where a test compares to the last bit.

    The gradient of attention on a GPU is otherwise summed in any order.
    """
    name = request.node.originalname
    is_exact = DEVICE != "cpu" and issubclass(request.cls, LearnerSuite)
    if not (is_exact and any(part in name for part in EXACT)):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# --- float32 --------------------------------------------------------------------------------
class TestFloat32Engine(EngineSuite):
    def make_engine(self, models: Mapping[str, Path]) -> TransformersEngine:
        return TransformersEngine(models, device=DEVICE)


class TestFloat32EngineWithLoRA(LoRAEngineSuite):
    def make_lora_engine(
        self, models: Mapping[str, Path], ranks: Mapping[str, int]
    ) -> TransformersEngine:
        return TransformersEngine(models, lora=ranks, device=DEVICE)


class TestFloat32Learner(LearnerSuite):
    def make_learner(self, models: Mapping[str, Any], **options: Any) -> TorchLearner:
        # adapters on a GPU are trained on bfloat16 weights otherwise
        return TorchLearner(models, device=DEVICE, dtype=torch.float32, **options)


# --- bfloat16 -------------------------------------------------------------------------------
def narrow(model: Any) -> Any:
    """Return a copy of a model in bfloat16 on the device."""
    return load_model(model, device=DEVICE, dtype=torch.bfloat16)


@torch.no_grad()
def rounding(model: Any) -> float:
    """Return the largest difference of a log-probability between bfloat16 and float32.

    It is of 16 sequences of 200 tokens that the model itself has sampled, at the temperature
    `COLDEST`, in one plain forward pass each.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    ids = torch.randint(5, vocabulary, (16, 200), generator=generator)
    exact = (model(ids).logits / COLDEST).log_softmax(-1)
    logits = narrow(model)(ids.to(DEVICE)).logits.float().cpu()
    rounded = (logits / COLDEST).log_softmax(-1)
    sampled = torch.multinomial(exact.flatten(0, 1).exp(), 1, generator=generator)
    difference = (exact - rounded).flatten(0, 1).gather(1, sampled).abs()
    return float(difference.max())


class _Bfloat16Engine(EngineSuite):
    """The suite with a tolerance that was measured, and another test of greedy answers."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def measured(cls, request: pytest.FixtureRequest, folder: Path, model: Any) -> None:
        """Set the tolerance."""
        suite: Any = request.cls
        others = [with_weights(folder, perturbed(model, seed)) for seed in (3, 11)]
        if issubclass(suite, LoRAEngineSuite):
            others = [merged(folder, low_rank(model, seed)) for seed in (3, 8, 9, 11)]
        suite.tolerance = MARGIN * max(rounding(each) for each in (model, *others))
        print(f"{suite.__name__}: tolerance {suite.tolerance:.3f}")

    async def test_greedy_takes_the_largest(
        self, engine: TokenEngine, model: Any, prompt: list[int]
    ) -> None:
        """Every greedy token is the likeliest, but for rounding."""
        answer = await generate(engine, prompt, temperature=0.0)
        distribution = reference(model, prompt, answer.ids)
        behind = distribution.max(-1).values - torch.tensor(of_tokens(distribution, answer.ids))
        assert float(behind.max()) <= 2 * self.tolerance
        assert answer.logprobs == pytest.approx([0.0] * len(answer.ids), abs=self.tolerance)


class TestBfloat16Engine(_Bfloat16Engine):
    def make_engine(self, models: Mapping[str, Path]) -> TransformersEngine:
        return TransformersEngine(models, device=DEVICE, dtype=torch.bfloat16)


class TestBfloat16EngineWithLoRA(_Bfloat16Engine, LoRAEngineSuite):
    def make_lora_engine(
        self, models: Mapping[str, Path], ranks: Mapping[str, int]
    ) -> TransformersEngine:
        return TransformersEngine(models, lora=ranks, device=DEVICE, dtype=torch.bfloat16)


class TestBfloat16Learner(LearnerSuite):
    def make_learner(self, models: Mapping[str, Any], **options: Any) -> TorchLearner:
        return TorchLearner(models, device=DEVICE, dtype=torch.bfloat16, **options)

    @pytest.mark.parametrize("budget", [100_000, 64])
    def test_scores_are_as_near_as_a_plain_pass(
        self, folder: Path, model: Any, budget: int
    ) -> None:
        rows = [*make_rows(model), *make_branching_rows(model)]
        tolerance = MARGIN * rounding(model)
        learner = self.make_learner({"writer": folder}, token_budget=budget)
        for row, score in zip(rows, learner.score(rows), strict=True):
            with torch.no_grad():
                assert score == pytest.approx(token_logprobs(model, row).tolist(), abs=tolerance)

    @pytest.mark.slow
    async def test_steps_are_as_near_as_plain_ones(self, folder: Path, model: Any) -> None:
        """Steps differ from those in float32 at most twice as much as a plain loop in bfloat16.

        The root mean square over several losses and rows counts: of the gradient's norm, and of the
        weights, relative to how far they moved. Losses are sums of what the test above compares.
        """
        squares = {"plain": [0.0] * 2, "learner": [0.0] * 2}
        for loss in (SFTLoss(), BOTH_CLIPS, PolicyLoss(entropy=0.05)):
            for seed in range(5):
                rows = make_branching_rows(model, seed=seed)
                exact = _plain_step(load_model(folder), rows, loss)
                start = weights_of(load_model(folder))
                plain = _plain_step(narrow(load_model(folder)), rows, loss)
                learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE, token_budget=64)
                metrics = learner.update(rows, loss)
                moved = {name: t.float() for name, t in (await published(learner)).items()}
                results = {
                    "plain": plain,
                    "learner": (metrics["grad_norm"], moved),
                }
                for name, (norm, weights) in results.items():
                    errors = (
                        abs(norm - exact[0]) / exact[0],
                        distance(weights, exact[1]) / distance(exact[1], start),
                    )
                    pairs = zip(squares[name], errors, strict=True)
                    squares[name] = [total + error**2 for total, error in pairs]
        print(f"sums of squares of norm and weights: {squares}")
        for square, limit in zip(squares["learner"], squares["plain"], strict=True):
            assert square <= MARGIN**2 * limit


def _plain_step(
    model: Any, rows: Sequence[Row], loss: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Take a step of a plain loop; return the gradient's norm and the weights."""
    optimizer = reference_optimizer(model, SGD_LIKE)
    with torch.device(model.device):
        norm = take_step(optimizer, model, reference_loss(_Float32Logits(model), rows, loss))
    return norm, {name: tensor.float().cpu() for name, tensor in weights_of(model).items()}


class _Float32Logits:
    """A model whose logits are float32, as in the learner."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, ids: torch.Tensor) -> Any:
        output = self._model(ids)
        output.logits = output.logits.float()
        return output


def leave_out(suite: type, *names: str) -> None:
    """Leave tests to float32; pytest collects what can be called."""
    for name in names:
        assert callable(getattr(suite, name)), name
        setattr(suite, name, None)


ROUNDED = (
    # rounding turns which tokens are in the nucleus, or end a greedy answer
    "test_top_p_and_top_k",
    "test_the_turn_ends_with_its_token",
    "test_stop_strings_end_the_ids_at_the_completing_token",
)
leave_out(TestBfloat16Engine, *ROUNDED)
leave_out(TestBfloat16EngineWithLoRA, *ROUNDED)
leave_out(
    TestBfloat16Learner,
    # replaced by the two tests above
    *("test_score", "test_score_under_a_grammar", "test_scores_of_rows_that_begin_alike"),
    *("test_a_step_is_the_reference_s", "test_the_gradient_s_norm_is_bounded"),
    "test_importance_weights_of_tokens_and_of_calls",
    # two ways to compute the same, whose sums round differently
    "test_the_result_does_not_depend_on_order_or_microbatches",
    "test_the_gap_to_the_engine_is_measured_before_the_step",
    "test_on_policy_every_form_has_the_gradient_of_clipping",
    "test_a_call_is_a_sequence_whatever_else_is_in_its_row",
    "test_the_metrics_of_clips_and_ratios",
    "test_lora_equals_its_merged_weights",
    "test_a_value_is_that_of_the_prompt",
    "test_the_metrics_are_of_the_values_before",
)
