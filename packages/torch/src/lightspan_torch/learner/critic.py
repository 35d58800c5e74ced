"""A policy's critic: the value of a call, read off the hidden state of its prompt's last token.

That token's node is the one that predicts the call's first response token, so an update computes it
anyway: the states are taken out of the update's own passes, without a gradient. They are kept for a
few updates, since a head can be fitted to them again and again at no cost. Those of earlier updates
are of weights that have moved since, by a few steps; the newest are always among them, and a value
is only ever asked of states of the weights of now.

The head is V = w·h + b. A fit is AdamW on w alone, in coordinates in which the kept states and
targets have mean 0 and spread 1; there, b is known. So rewards may have any scale and offset, and
states too (pretrained trunks have dimensions a hundred times as large as others); nothing runs
along that could be out of date, because w and b are kept in the plain coordinates (as PopArt does,
arXiv 1602.07714).
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
"""AdamW's: gradients are of order 1 here. A direction that hardly shows in the kept states gets no
full step from rounding errors."""
FLOOR: Final = 0.03
"""A dimension that varies less than this part of the states' size is not blown up to spread 1: it
may vary more in states to come."""


class CallStates:
    """The states at which C calls begin, as passes are computed.

    Args:
        first: [C] the number of each call's first token among the looked-at ones.
        looked: how many looked-at tokens there are (`Pass.entries` are numbers of them).
        hidden: the size of a state.

    Attributes:
        states: [C, hidden] float32
    """

    def __init__(
        self, first: Sequence[int], looked: int, hidden: int, device: torch.device
    ) -> None:
        self.states = torch.zeros(len(first), hidden, device=device)
        self._call = torch.full((looked,), -1, device=device)
        """[looked] which call begins with the token; -1 for none."""
        self._call[torch.tensor(first, dtype=torch.int64, device=device)] = torch.arange(
            len(first), device=device
        )
        self.done = False
        """Whether they are all there: further passes are not looked at."""

    def beside(self, head: Head) -> Head:
        """The head, which is shown each pass after its states were taken."""
        if self.done:
            return head

        def both(hidden: Tensor, made: Pass) -> list[tuple[Tensor, Tensor]]:
            self.take(hidden, made)
            return head(hidden, made)

        return both

    def take(self, hidden: Tensor, made: Pass) -> list[tuple[Tensor, Tensor]]:
        """A head (`passes.Head`) of its own."""
        calls = self._call[made.entries]
        begins = calls >= 0
        self.states[calls[begins]] = hidden.detach()[made.places[begins]].float()
        return []


def first_tokens(rows: Iterable[Row], looked: Iterable[Sequence[int]]) -> list[int]:
    """Of each call of the rows, the number of its first token among the looked-at ones, which rise
    in each row."""
    first, offset = [], 0
    for row, places in zip(rows, looked, strict=True):
        first += [offset + bisect_left(places, response.start) for response in row.responses]
        offset += len(places)
    return first


def targets_of(rows: Iterable[Row]) -> list[float]:
    """[C] of each call of the rows; NaN for none."""
    return [
        target for row in rows for target in row.value_targets or [math.nan] * len(row.responses)
    ]


def check_calls(rows: Iterable[Row]) -> None:
    """Raise `DataError` for a call whose value cannot be computed."""
    for row in rows:
        for response in row.responses:
            if not 1 <= response.start < len(row.ids):
                raise DataError(
                    f"a row of rollout {row.rollout_id} has {len(row.ids)} ids and a call that "
                    f"begins at place {response.start}: its value is read at the token before it"
                )


def check_targets(rows: Iterable[Row]) -> None:
    """Raise `DataError` for value targets that no critic could be fitted to."""
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
    """V = w·h + b, and what it is fitted to (see the module).

    Args:
        hidden: the size of a state.
    """

    def __init__(self, hidden: int, settings: Critic, device: torch.device) -> None:
        self._hidden = hidden
        self._settings = settings
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._weight = torch.zeros(self._hidden, device=self._device)
        self._bias = torch.zeros((), device=self._device)
        self._recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=self._settings.batches)
        """([C, hidden] states, [C] targets in float64) of the last updates."""
        self._slope = torch.nn.Parameter(torch.zeros_like(self._weight))
        """w in the coordinates of a fit; outside of one it means nothing."""
        # per coordinate: together they move a value by up to `learning_rate`
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
        """[C]

        Args:
            states: [C, hidden]
        """
        return list((states @ self._weight + self._bias).tolist())

    def learn(self, states: Tensor, targets: Sequence[float]) -> dict[str, float]:
        """Fit to these and to what is kept. Returns the metrics that `Learner.update` names; none
        without targets.

        Args:
            states: [C, hidden] of the calls of an update.
            targets: [C], NaN for none.
        """
        wanted = torch.tensor(targets, dtype=torch.float64, device=states.device)
        having = ~wanted.isnan()
        states, wanted = states[having], wanted[having]
        if not len(wanted):
            return {}
        metrics = _quality(self.values(states), wanted.tolist())
        self._recent.append((states, wanted))
        self._fit()
        return metrics

    @torch.no_grad()
    def _fit(self) -> None:
        states = torch.cat([kept for kept, _ in self._recent])
        targets = torch.cat([kept for _, kept in self._recent])
        centre, spread = states.mean(0), _spread(states)
        middle = targets.mean()
        # if they are all the same, w has to go to 0: then any scale will do
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
        """All that the next values and fits depend on."""
        tensors = {"weight": self._weight, "bias": self._bias}
        for number, (states, targets) in enumerate(self._recent):
            tensors |= {f"states/{number}": states, f"targets/{number}": targets}
        state = self._optimizer.state[self._slope] if self._recent else {}
        return {**tensors, **{f"optimizer/{name}": value for name, value in state.items()}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `saved_tensors`.

        Raises:
            CheckpointError: of another size.
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
                step=tensors["optimizer/step"],  # torch keeps it on the CPU
                exp_avg=own["optimizer/exp_avg"],
                exp_avg_sq=own["optimizer/exp_avg_sq"],
            )


def _spread(states: Tensor) -> Tensor:
    """[hidden] what each dimension is divided by."""
    size = float(states.square().mean().sqrt())
    return states.std(0, correction=0).clamp(min=max(FLOOR * size, 1e-12))


def _quality(values: Sequence[float], targets: Sequence[float]) -> dict[str, float]:
    pairs = list(zip(values, targets, strict=True))
    metrics = {
        "value_loss": math.fsum((value - target) ** 2 for value, target in pairs) / len(pairs),
        "value_calls": float(len(pairs)),
    }
    explained = explained_variance(values, targets)
    return metrics if explained is None else {**metrics, "explained_variance": explained}
