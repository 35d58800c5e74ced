"""What every rank but the first runs: it takes orders of rank 0 until that has no more.

As a program: `worker RANK RENDEZVOUS TIMEOUT DEVICE …`. Its standard input is its lifeline: it ends
when that does, so at once when the trainer is killed, whatever it is computing.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightspan.errors import LightspanError
from lightspan.learners.ranks.group import FOREVER, Group, GroupError, dist, ready, runs
from lightspan.learners.ranks.messages import (
    Answer,
    Drop,
    End,
    Failure,
    Load,
    Order,
    Score,
    Setup,
    States,
    Update,
    orders,
    packed,
)
from lightspan.learners.ranks.processes import LOST
from lightspan.learners.ranks.steps import RankSums
from lightspan.learners.torch import TorchLearner


def main(arguments: Sequence[str]) -> None:
    """Serve rank 0 until this process is no longer wanted."""
    threading.Thread(target=_hold_lifeline, name="lightspan-lifeline", daemon=True).start()
    rank, path, timeout_s, *devices = arguments
    store = dist.FileStore(path, len(devices))
    store.set(ready(int(rank)), runs())
    try:
        if not serve(Group(store, int(rank), devices, timeout_s=float(timeout_s))):
            os._exit(LOST)  # at once, so that the trainer sees which of its ranks does not end
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an interpreter that ends in order aborts: the lifeline's thread reads stdin


def _hold_lifeline() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def serve(group: Group) -> bool:
    """Do what rank 0 orders, until it has no more or has ended; whether it had no more."""
    served = Served(group)
    try:
        while True:
            order = orders.decode(group.receive(0, within=FOREVER))
            if isinstance(order, End):
                return True
            group.send(0, packed(served.answer(order)))
    except GroupError:
        return False  # rank 0 says why, if it still can


class Served:
    """The learners of this rank."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._learners: dict[int, TorchLearner] = {}
        self._sums: dict[int, RankSums] = {}

    def answer(self, order: Order) -> Answer:
        """What came of an order. An error that is none of ours ends the process: nobody could say
        what state it is in."""
        try:
            return self._obey(order)
        except LightspanError as error:
            return Answer(failure=Failure.of(error))

    def _obey(self, order: Order) -> Answer:
        match order:
            case Setup():
                self._set_up(order)
                return Answer()
            case Drop():
                self._learners.pop(order.learner, None)
                self._sums.pop(order.learner, None)
                return Answer()
            case Load():
                self._learners[order.learner].load(Path(order.folder))
                return Answer()
            case Update():
                return self._update(order)
            case Score():
                return self._score(order)
        raise AssertionError(order)

    def _set_up(self, order: Setup) -> None:
        torch.set_num_threads(order.threads)
        sums = RankSums(self._group)
        self._sums[order.learner] = sums
        self._learners[order.learner] = learner_of(order, sums)

    def _update(self, order: Update) -> Answer:
        learner, sums = self._learners[order.learner], self._sums[order.learner]
        sums.begin(len(order.fresh))
        try:
            steps = learner.take_steps(order.rows, order.loss, order.old_logprobs, order.fresh)
        except LightspanError as error:
            sums.fail(error)
            raise
        return Answer(
            cpu_s=learner.usage()["cpu_s"],
            grad_norms={policy: step.metrics["grad_norm"] for policy, step in steps.items()},
            states={
                policy: _states(step.states, step.targets)
                for policy, step in steps.items()
                if step.targets
            },
        )

    def _score(self, order: Score) -> Answer:
        learner = self._learners[order.learner]
        scores, states = learner.scores_and_states(order.rows, order.which, states=order.states)
        return Answer(
            cpu_s=learner.usage()["cpu_s"],
            scores=scores,
            states={policy: _states(found, []) for policy, found in states.items()},
        )


def learner_of(order: Setup, sums: RankSums) -> TorchLearner:
    """The learner that an order describes."""
    return TorchLearner(
        order.models,
        optimizer=order.optimizer,
        lora=order.lora,
        device=order.device,
        dtype=None if order.dtype is None else getattr(torch, order.dtype),
        token_budget=order.token_budget,
        seed=order.seed,
        share_prefixes=order.share_prefixes,
        critic=order.critic,
        sums=sums,
    )


def _states(states: Tensor, targets: list[float]) -> States:
    data = states.detach().float().cpu().contiguous()
    return States(data=data.numpy().tobytes(), hidden=data.shape[1], targets=targets)


if __name__ == "__main__":
    main(sys.argv[1:])
