"""A policy's critic: estimates the value of a call, which is its expected return.

The critic's input is the model's hidden state at the last token of a call's prompt. An update
computes this state anyway, because it predicts the first token of the answer. So the states are
collected from the forward passes of the update. The states of a few updates are stored, because
training the critic on them costs little. The older ones come from weights that are a few steps old.
Values are only computed from states of the current weights.

The value is V = w·h + b, with h the hidden state. AdamW fits w to the stored states and their
targets, which are first scaled to mean 0 and standard deviation 1. In these coordinates b is 0. So
rewards and states may have any scale and offset. (In pretrained models, some dimensions of the
states are a hundred times as large as others.) w and b are stored in the original coordinates, as
in PopArt (arXiv 1602.07714), so that no running mean or deviation can become outdated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from lightspan.errors import CheckpointError, DataError
from lightspan.lightning.advantages import identical
from lightspan.lightning.gae import explained_variance
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Critic
from lightspan_torch.learner.tree_forward import Head, Pass

BETAS: Final = (0.9, 0.95)
EPSILON: Final = 1e-3
"""AdamW's epsilon. Gradients are of order 1, so in a direction in which the states hardly vary,
rounding errors do not cause a full step."""
MIN_SPREAD: Final = 0.03
"""Lower bound of a dimension's standard deviation, as a fraction of the states' root mean square.
The states of later updates may vary more in a dimension than the stored states do."""


class CallStates:
    """Collects the hidden state that predicts the first token, for each of C calls.

    Args:
        first: [C] the index of each call's first token among the selected tokens.
        selected: number of selected tokens. `Pass.entries` has indices of them.
        hidden: size of a hidden state.
        device: device of the states.

    Attributes:
        states: [C, hidden] float32
    """

    def __init__(
        self, first: Sequence[int], selected: int, hidden: int, device: torch.device
    ) -> None:
        self.states = torch.zeros(len(first), hidden, device=device)
        self._call = torch.full((selected,), -1, device=device)
        """[selected] index of the call that starts with the token; -1 if no call starts with it."""
        self._call[torch.tensor(first, dtype=torch.int64, device=device)] = torch.arange(
            len(first), device=device
        )
        self.is_complete = False
        """Whether all states are collected, so that further passes need not be looked at."""

    def before(self, head: Head) -> Head:
        """Return a function that collects the states of a pass and then calls `head`.

        The function, like `head`, is called with the hidden states of each pass. If all states are
        collected already, return `head` itself.
        """
        if self.is_complete:
            return head

        def both(hidden: Tensor, current_pass: Pass) -> list[tuple[Tensor, Tensor]]:
            self.collect(hidden, current_pass)
            return head(hidden, current_pass)

        return both

    def collect(self, hidden: Tensor, current_pass: Pass) -> list[tuple[Tensor, Tensor]]:
        """Store the hidden states of this pass that belong to calls.

        Return an empty list, in the place of gradients, so that the pass has no backward pass.

        Args:
            hidden: [nodes, hidden] hidden states of the pass.
            current_pass: the pass.
        """
        calls = self._call[current_pass.entries]
        starts = calls >= 0
        self.states[calls[starts]] = hidden.detach()[current_pass.places[starts]].float()
        return []


def first_tokens(rows: Iterable[Row], selected: Iterable[Sequence[int]]) -> list[int]:
    """Return [C] the index of each call's first token among the selected tokens of all rows.

    Args:
        rows: the rows.
        selected: for each row, the ascending positions of its selected tokens.
    """
    first, offset = [], 0
    for row, places in zip(rows, selected, strict=True):
        first += [offset + bisect_left(places, response.start) for response in row.responses]
        offset += len(places)
    return first


def targets_of(rows: Iterable[Row]) -> list[float]:
    """Return the value target of each call of all rows, [C]; NaN for a call without a target."""
    return [
        target for row in rows for target in row.value_targets or [math.nan] * len(row.responses)
    ]


def check_calls(rows: Iterable[Row]) -> None:
    """Raise `DataError` if a call starts at a row's first token or outside the row."""
    for row in rows:
        for response in row.responses:
            if not 1 <= response.start < len(row.ids):
                raise DataError(
                    f"a row of rollout {row.rollout_id} has {len(row.ids)} ids and a call that "
                    f"begins at place {response.start}: its value needs the token before it"
                )


def check_targets(rows: Iterable[Row]) -> None:
    """Raise `DataError` if the value targets of a row are invalid."""
    for row in rows:
        if not row.value_targets:
            continue
        if len(row.value_targets) != len(row.responses):
            raise DataError(
                f"a row of rollout {row.rollout_id} has {len(row.responses)} calls but "
                f"{len(row.value_targets)} value targets"
            )
        if any(map(math.isinf, row.value_targets)):
            raise DataError(
                f"a row of rollout {row.rollout_id} has an infinite value target; NaN means none"
            )
        check_calls([row])
        if not all(row.mask[response.start] for response in row.responses):
            raise DataError(
                f"a row of rollout {row.rollout_id} has a value target for a call whose first "
                "token is not trained"
            )


class ValueHead:
    """The critic's parameters (V = w·h + b), and the states and targets of recent updates.

    The module's docstring describes how it is fitted.

    Args:
        hidden: size of a hidden state.
        settings: the critic's settings.
        device: device of the head and the stored states.
    """

    def __init__(self, hidden: int, settings: Critic, device: torch.device) -> None:
        self._hidden = hidden
        self._settings = settings
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Set the head to 0, and delete the stored states and targets."""
        self._weight = torch.zeros(self._hidden, device=self._device)
        self._bias = torch.zeros((), device=self._device)
        self._recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=self._settings.batches)
        """([C, hidden] states, [C] float64 targets) of each of the last updates."""
        self._slope = torch.nn.Parameter(torch.zeros_like(self._weight))
        """w in the coordinates of the fit, in which states and targets have mean 0 and deviation
        1."""
        # per dimension, so that all together move a value by up to `learning_rate`
        self._rate = self._settings.learning_rate / self._hidden
        self._optimizer = torch.optim.AdamW(
            [self._slope],
            lr=self._rate,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=self._settings.weight_decay * self._hidden,
        )

    @torch.no_grad()
    def values(self, states: Tensor) -> list[float]:
        """Return the [C] values for [C, hidden] hidden states."""
        return list((states @ self._weight + self._bias).tolist())

    def learn(self, states: Tensor, targets: Sequence[float]) -> dict[str, float]:
        """Fit the critic to the new and the stored states, and return its metrics.

        Args:
            states: [C, hidden] for each call of an update, the hidden state before the call.
            targets: [C] value targets; NaN for a call without a target.

        Returns:
            The critic's metrics of `Learner.update`, for the values from before the fit. If all
            targets are NaN, nothing is fitted and the result is empty.
        """
        goals = torch.tensor(targets, dtype=torch.float64, device=states.device)
        has_target = ~goals.isnan()
        states, goals = states[has_target], goals[has_target]
        if not len(goals):
            return {}
        metrics = _quality(self.values(states), goals.tolist())
        self._recent.append((states, goals))
        self._fit()
        return metrics

    @torch.no_grad()
    def _fit(self) -> None:
        states = torch.cat([batch for batch, _ in self._recent])
        targets = torch.cat([batch for _, batch in self._recent])
        centre = states.mean(0)
        size = float(states.square().mean().sqrt())
        spread = states.std(0, correction=0).clamp(min=max(MIN_SPREAD * size, 1e-12))
        middle = targets.mean()
        # for identical targets w goes to 0 with any scale
        scale = 1.0 if identical(targets.tolist()) else float(targets.std(correction=0))
        inputs = (states - centre) / spread
        outputs = ((targets - middle) / scale).float()
        self._slope.copy_(self._weight * spread / scale)
        steps = self._settings.steps
        for step in range(steps):
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate * (1 - step / steps)
            errors = inputs @ self._slope - outputs
            self._slope.grad = errors @ inputs * (2 / len(errors))
            self._optimizer.step()
        self._weight = self._slope * scale / spread
        self._bias = middle.float() - self._weight @ centre

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint."""
        tensors = {"weight": self._weight, "bias": self._bias}
        for number, (states, targets) in enumerate(self._recent):
            tensors |= {f"states/{number}": states, f"targets/{number}": targets}
        state = self._optimizer.state[self._slope] if self._recent else {}
        return {**tensors, **{f"optimizer/{name}": value for name, value in state.items()}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Set the head to the state that `saved_tensors` returned.

        Raises:
            CheckpointError: `tensors` belong to a model whose hidden states have another size.
        """
        if tensors["weight"].shape != self._weight.shape:
            raise CheckpointError(
                f"the checkpoint's critic has {len(tensors['weight'])} weights, here {self._hidden}"
            )
        self.reset()
        own = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        self._weight, self._bias = own["weight"], own["bias"]
        for number in range(sum(name.startswith("states/") for name in own)):
            self._recent.append((own[f"states/{number}"], own[f"targets/{number}"]))
        if self._recent:
            self._optimizer.state[self._slope].update(
                step=tensors["optimizer/step"],  # torch stores it on the CPU
                exp_avg=own["optimizer/exp_avg"],
                exp_avg_sq=own["optimizer/exp_avg_sq"],
            )


def _quality(values: Sequence[float], targets: Sequence[float]) -> dict[str, float]:
    pairs = list(zip(values, targets, strict=True))
    metrics = {
        "value_loss": math.fsum((value - target) ** 2 for value, target in pairs) / len(pairs),
        "value_calls": float(len(pairs)),
    }
    explained = explained_variance(values, targets)
    return metrics if explained is None else {**metrics, "explained_variance": explained}
