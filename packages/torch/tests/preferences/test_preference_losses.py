"""Test the losses of KTO and DPO: TRL's numbers, the formulas, and their exact gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightspan_torch.learner.torch import TorchLearner
from lightspan_torch.preferences.examples import Pair, Verdict
from lightspan_torch.preferences.losses import (
    dpo_losses,
    kl_reference,
    kto_losses,
    mean_and_gradient,
    ranking_accuracy,
)
from lightspan_torch.preferences.objectives import DPO, KTO, Answer, Answers
from lightspan_torch.sft.updates import POLICY
from packages.torch.tests.learner.gradients import make_model

LOGPROBS = [[-1.0, -0.5, -0.25], [-2.0, -1.5, -0.5], [-0.3, -0.2, -0.9], [-1.1, -2.2, -0.7]]
START = [[-1.5, -0.75, -0.5], [-1.0, -1.25, -0.75], [-0.4, -0.6, -0.8], [-1.3, -1.2, -0.6]]
OTHER = [[-3.0, -2.0, -1.0], [-2.5, -1.5, -0.5], [-3.5, -0.5, -1.5], [-1.0, -2.0, -4.0]]
OTHER_START = [[-3.2, -2.4, -1.3], [-2.6, -1.9, -0.4], [-3.1, -0.9, -1.8], [-1.4, -2.6, -3.9]]
"""Log-probabilities of the three tokens of each of four answers; OTHER of answers to other
prompts."""


def _ratios(logprobs: Any, start: Any) -> Tensor:
    return (torch.tensor(logprobs, dtype=torch.float64) - torch.tensor(start)).sum(-1)


RATIOS = _ratios(LOGPROBS, START)
DESIRABLE = torch.tensor([True, False, True, False])


@pytest.mark.parametrize(
    ("others", "beta", "weights", "loss", "gradient"),
    [
        (
            _ratios(OTHER, OTHER_START),
            *(0.1, (1.0, 1.0), 0.4794159343815041),
            [-0.006247803249256556, 0.006208921143359239, -0.006249209051112157, 0.0062138024939],
        ),
        (
            _ratios(OTHER, OTHER_START),
            *(0.5, (1.0, 1.33), 0.4533053382376037),
            [-0.030976943143632894, 0.03539280727801354, -0.031151331242106565, 0.0360619107593],
        ),
        (
            torch.full((4,), -1.5, dtype=torch.float64),  # below 0, so that z is 0
            *(0.1, (1.0, 1.0), 0.4793895333425886),
            [-0.006234401004822299, 0.006234401004822299, -0.006247500666515587, 0.0062373608163],
        ),
    ],
)
def test_kto_has_the_values_of_trl(
    others: Tensor, beta: float, weights: tuple[float, float], loss: float, gradient: list[float]
) -> None:
    """Numbers of TRL 1.16.0.

    `KTOTrainer._compute_loss` was called with a stub of a model that returns LOGPROBS and OTHER as
    `log_probs` of answers of three tokens, with `precompute_ref_logps` and the sums of START and
    OTHER_START as `ref_logps` and `ref_KL_logps`. The gradient is that by LOGPROBS.
    """

    def losses(ratios: Tensor) -> Tensor:
        reference = kl_reference(others)
        des, und = weights
        return kto_losses(
            *(ratios, DESIRABLE, reference),
            beta=beta,
            desirable_weight=des,
            undesirable_weight=und,
        )

    mean, derivative = mean_and_gradient(losses, RATIOS)
    assert mean == pytest.approx(loss, rel=1e-5)
    assert derivative == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize(
    ("beta", "loss", "gradient"),
    [
        (0.1, 0.6808783967920016, [-0.024250224919029496, -0.025124998958343747]),
        (0.5, 0.6364074462409067, [-0.10638937079708526, -0.12812434912105258]),
    ],
)
def test_dpo_has_the_values_of_trl(beta: float, loss: float, gradient: list[float]) -> None:
    """Numbers of TRL 1.16.0, `DPOTrainer._compute_loss`, `loss_type="sigmoid"`, as for KTO.

    The first two answers are the better ones.
    """
    mean, derivative = mean_and_gradient(
        lambda ratios: dpo_losses(*ratios.chunk(2), beta=beta), RATIOS
    )
    assert mean == pytest.approx(loss, rel=1e-5)
    assert derivative == pytest.approx([*gradient, *(-value for value in gradient)], rel=1e-5)


def test_the_formulas_one_answer_at_a_time() -> None:
    """Compute both losses with `math` alone."""
    beta, reference, ratios = 0.3, 0.4, RATIOS.tolist()
    expected = [
        weight / (1 + math.exp(sign * beta * (ratio - reference)))
        for ratio, (sign, weight) in zip(ratios, [(1, 2.0), (-1, 3.0)] * 2, strict=True)
    ]
    losses = kto_losses(
        *(RATIOS, DESIRABLE, torch.tensor(reference)),
        beta=beta,
        desirable_weight=2.0,
        undesirable_weight=3.0,
    )
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)
    pairs = zip(ratios[:2], ratios[2:], strict=True)
    assert dpo_losses(RATIOS[:2], RATIOS[2:], beta=beta).tolist() == pytest.approx(
        [math.log(1 + math.exp(-beta * (better - worse))) for better, worse in pairs]
    )


def test_a_reference_point_without_answers_is_zero() -> None:
    assert float(kl_reference(torch.zeros(0))) == 0.0
    assert float(kl_reference(torch.tensor([1.0, 2.0]))) == 1.5
    assert float(kl_reference(torch.tensor([1.0, -2.0]))) == 0.0


def test_the_accuracy_counts_all_combinations_and_halves_ties() -> None:
    assert ranking_accuracy(torch.tensor([2.0, 1.0]), torch.tensor([1.0])) == 0.75
    assert ranking_accuracy(torch.tensor([2.0]), torch.tensor([])) is None


VERDICTS = [
    Verdict(prompt_ids=[5, 6, 7], response_ids=[8, 9], desirable=True),
    Verdict(prompt_ids=[5, 6, 7], response_ids=[9, 8, 2], desirable=False),
    Verdict(prompt_ids=[11, 12], response_ids=[13], desirable=True),
    Verdict(prompt_ids=[11, 12, 14], response_ids=[8, 15, 16, 2], desirable=False),
]
OTHERS = [[13], [8, 15], None, [9]]
PAIRS = [
    Pair(prompt_ids=[5, 6, 7], chosen_ids=[8, 9], rejected_ids=[9, 8, 2]),
    Pair(prompt_ids=[11, 12], chosen_ids=[13], rejected_ids=[14, 2]),
]


def _moved(learner: TorchLearner) -> Any:
    """Change the learner's weights, and return its model."""
    model = learner._models[POLICY].plain
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    return model


def _caught(learner: TorchLearner, update: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the metrics of an update and its gradients by name; no weight changes."""
    stepper = learner._steppers[POLICY]
    caught: dict[str, Tensor] = {}

    def catch() -> float:
        caught.update(
            (name, parameter.grad.clone())
            for name, parameter in stepper._parameters.items()
            if parameter.grad is not None
        )
        return math.nan

    stepper.clip = catch  # type: ignore[method-assign]
    return update(), caught


def _logprob(model: Any, prompt: Any, response: Any) -> Tensor:
    """Return the log-probability of an answer with transformers, with a graph."""
    ids = torch.tensor([[*prompt, *response]])
    logprobs = model(ids).logits[0].log_softmax(-1)
    places = range(len(prompt), ids.shape[1])
    return torch.stack([logprobs[place - 1, ids[0, place]] for place in places]).sum()


@pytest.mark.parametrize("loss", ["kto", "dpo"])
def test_the_gradient_of_an_update_is_that_of_the_loss(loss: str) -> None:
    """Compare with one graph of the whole loss through the model, with moved weights."""
    start = make_model("Qwen2")
    learner = TorchLearner({POLICY: start})
    objective: Any = KTO(VERDICTS, OTHERS, 0.5, (1.0, 2.0)) if loss == "kto" else DPO(PAIRS, 0.5)
    answers = Answers(learner, objective.answers())
    model = _moved(learner)

    def ratio(prompt: Any, response: Any) -> Tensor:
        return _logprob(model, prompt, response) - _logprob(start, prompt, response).detach()

    if loss == "kto":
        ratios = torch.stack([ratio(v.prompt_ids, v.response_ids) for v in VERDICTS])
        others = [
            ratio(verdict.prompt_ids, other).detach()
            for verdict, other in zip(VERDICTS, OTHERS, strict=True)
            if other is not None
        ]
        reference = torch.stack(others).mean().clamp(min=0)
        values = [
            weight * (1 - torch.sigmoid(sign * 0.5 * (r - reference)))
            for r, (sign, weight) in zip(ratios, [(1, 1.0), (-1, 2.0)] * 2, strict=True)
        ]
    else:
        values = [
            -torch.nn.functional.logsigmoid(
                0.5 * (ratio(p.prompt_ids, p.chosen_ids) - ratio(p.prompt_ids, p.rejected_ids))
            )
            for p in PAIRS
        ]
    expected = torch.stack(values).mean()
    expected.backward()  # type: ignore[no-untyped-call]
    # the learner sets these to zero first
    reference_gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    metrics, gradients = _caught(learner, lambda: objective.update(answers, range(len(values))))
    assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    total = torch.stack([g.norm() for g in reference_gradients.values()]).norm()
    assert total > 0
    for name, gradient in gradients.items():
        difference = (gradient - reference_gradients[name]).norm()
        assert float(difference) < 1e-4 * max(
            float(reference_gradients[name].norm()), 1e-3 * float(total)
        ), name


@pytest.mark.parametrize("loss", ["kto", "dpo"])
def test_the_margin_is_the_difference_of_the_implicit_rewards(loss: str) -> None:
    learner = TorchLearner({POLICY: make_model("Qwen2")})
    beta = 0.5
    objective: Any = KTO(VERDICTS, OTHERS, beta, (1.0, 1.0)) if loss == "kto" else DPO(PAIRS, beta)
    answers = Answers(learner, objective.answers())
    _moved(learner)
    own = [Answer(tuple(v.prompt_ids), tuple(v.response_ids)) for v in VERDICTS]
    places = [0, 2, 1, 3]  # the better answers first
    if loss == "dpo":
        own = [
            Answer(tuple(pair.prompt_ids), tuple(ids))
            for pair in PAIRS
            for ids in (pair.chosen_ids, pair.rejected_ids)
        ]
    better, worse = answers.ratios([own[place] for place in places]).chunk(2)
    margin = objective.evaluate(answers, range(len(own) if loss == "kto" else 2))["margin"]
    assert margin == pytest.approx(beta * float(better.mean() - worse.mean()), abs=1e-4)
    assert abs(margin) > 1e-3


def test_the_ratio_to_the_start_is_that_of_enumerated_answers() -> None:
    """Enumerate the vocabulary: E[exp(r)] under the start is 1, for a whole distribution."""
    learner = TorchLearner({POLICY: make_model("Qwen2", vocab_size=16)})
    tokens = [Answer((3, 4), (token,)) for token in range(16)]
    answers = Answers(learner, tokens)
    assert answers.ratios(tokens).abs().max() == 0
    start = [answers._start[answer] for answer in tokens]
    _moved(learner)
    ratios = answers.ratios(tokens)
    assert ratios.abs().max() > 1e-3
    total = math.fsum(math.exp(p + r) for p, r in zip(start, ratios.tolist(), strict=True))
    assert total == pytest.approx(1.0, abs=1e-5)
