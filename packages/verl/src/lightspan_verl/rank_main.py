"""What each of verl's processes runs: `rank RANK RANKS SOCKET RENDEZVOUS`.

Its standard input is its lifeline: it ends when that does, so at once when the trainer is killed,
whatever it is computing. Orders come, and answers go, by the socket that it was handed. Of a rank
in Ray (`ray_group`) only what it serves is here.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightspan.errors import CheckpointError, LightspanError
from lightspan_verl.framing import hold_lifeline, receive, send
from lightspan_verl.policy import Policy
from lightspan_verl.rpc import (
    Answer,
    Drop,
    Failure,
    Hash,
    Load,
    Order,
    Save,
    Score,
    Setup,
    Update,
    Weights,
    orders,
    packed,
)

FOREVER = timedelta(days=365)
"""Rollouts may take days, in which ranks have nothing to do."""


def main(arguments: Sequence[str]) -> None:
    """Serve the trainer until this process is no longer wanted."""
    threading.Thread(target=hold_lifeline, name="lightspan-lifeline", daemon=True).start()
    rank, ranks, descriptor, path = arguments
    link = socket.socket(fileno=int(descriptor))
    connect(int(rank), int(ranks), path)
    served = RankService(int(rank), int(ranks))
    while (data := receive(link)) is not None:
        send(link, packed(served.answer(orders.decode(data))))


def connect(rank: int, ranks: int, path: str) -> None:
    """Make the process group that verl looks for. Ranks find each other by a file, and gloo keeps
    to the loopback interface (GLOO_SOCKET_IFNAME)."""
    backend = "gloo"
    if os.environ.get("VERL_PLATFORM") != "cpu":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(0)
    distributed: Any = torch.distributed  # most of its names are not in its stubs
    distributed.init_process_group(
        backend=backend,
        store=distributed.FileStore(path, ranks),
        rank=rank,
        world_size=ranks,
        timeout=FOREVER,
    )


class RankService:
    """The learners of this rank."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._learners: dict[int, dict[str, Policy]] = {}

    def answer(self, order: Order) -> Answer:
        """What came of an order. An error that is none of ours ends the process: nobody could say
        what state it is in."""
        start = time.process_time()
        try:
            answer = self._obey(order)
        except LightspanError as error:
            answer = Answer(failure=Failure.of(error))
        answer.cpu_s = time.process_time() - start
        return answer

    def _obey(self, order: Order) -> Answer:
        match order:
            case Setup():
                torch.set_num_threads(order.threads)
                self._learners[order.learner] = {
                    policy: Policy(order, policy, rank=self._rank, ranks=self._ranks)
                    for policy in order.models
                }
                return Answer(versions={name: version(name) for name in ("verl", "torch")})
            case Drop():
                self._learners.pop(order.learner, None)
                return Answer()
            case Update():
                tally, norm = self._policy(order).update(order)
                sums, peaks = tally.state
                return Answer(sums=sums, peaks=peaks, grad_norm=norm)
            case Score():
                return Answer(scores=self._policy(order).score(order))
            case Hash():
                return Answer(hash=self._policy(order).hash(frozen=order.frozen))
            case Weights():
                path = Path(order.path) if self._rank == 0 else None
                return Answer(aliases=self._written(order, path))
            case Save():
                for number, policy in enumerate(self._learners[order.learner].values()):
                    self._saved(policy, Path(order.folder), number)
                return Answer()
            case Load():
                # in the order of the checkpoint, whatever this process's is: shards bear numbers
                policies = self._learners[order.learner]
                for number, (name, steps) in enumerate(order.steps.items()):
                    policies[name].load(Path(order.folder), number, steps)
                return Answer()
        raise AssertionError(order)

    def _policy(self, order: Update | Score | Hash | Weights) -> Policy:
        return self._learners[order.learner][order.policy]

    def _written(self, order: Weights, path: Path | None) -> dict[str, str]:
        from safetensors import SafetensorError

        try:
            return self._policy(order).weights(order.kind, path)
        except (OSError, SafetensorError) as error:  # a full disk is either
            raise CheckpointError(f"cannot write weights to {path}: {error}") from error

    def _saved(self, policy: Policy, folder: Path, number: int) -> None:
        from safetensors import SafetensorError

        try:
            policy.save(folder, number)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write the checkpoint {folder}: {error}") from error


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the end of an interpreter with torch's groups takes its time
