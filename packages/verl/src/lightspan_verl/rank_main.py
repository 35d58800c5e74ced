"""Main module of a rank, one of verl's processes: `rank_main RANK RANKS SOCKET RENDEZVOUS`.

RANK is the number of this rank, RANKS the number of all ranks. SOCKET is the file descriptor of a
socket, over which the rank receives orders and sends answers. RENDEZVOUS is the path of a file by
which the ranks find each other. The process exits when its standard input is closed. That happens
also when the trainer is killed.
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
from lightspan_verl.framing import exit_with_parent, receive, send
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
    order_decoder,
    packed,
)

FOREVER = timedelta(days=365)
"""Timeout of collective operations. It is long because ranks may be idle for days during
rollouts."""


def main(arguments: Sequence[str]) -> None:
    """Execute the trainer's orders until the trainer closes the socket."""
    threading.Thread(target=exit_with_parent, name="lightspan-parent-pipe", daemon=True).start()
    rank, ranks, descriptor, path = arguments
    link = socket.socket(fileno=int(descriptor))
    connect(int(rank), int(ranks), path)
    service = RankService(int(rank), int(ranks))
    while (data := receive(link)) is not None:
        send(link, packed(service.answer(order_decoder.decode(data))))


def connect(rank: int, ranks: int, path: str) -> None:
    """Create the default process group of torch.distributed, which verl uses.

    On the CPU it uses gloo, over the loopback interface (GLOO_SOCKET_IFNAME). On GPUs it uses NCCL
    too.

    Args:
        rank: number of this rank, from 0.
        ranks: number of ranks.
        path: file by which the ranks find each other.
    """
    backend = "gloo"
    if os.environ.get("VERL_PLATFORM") != "cpu":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(0)
    distributed: Any = torch.distributed  # its stubs are incomplete
    distributed.init_process_group(
        backend=backend,
        store=distributed.FileStore(path, ranks),
        rank=rank,
        world_size=ranks,
        timeout=FOREVER,
    )


class RankService:
    """Executes the trainer's orders; keeps this rank's part of each learner."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._learners: dict[int, dict[str, Policy]] = {}

    def answer(self, order: Order) -> Answer:
        """Execute an order, and return the answer.

        If the order raises a lightspan error, the answer contains the error. Any other error ends
        the process, because its state is then unknown.
        """
        start = time.process_time()
        try:
            answer = self._execute(order)
        except LightspanError as error:
            answer = Answer(failure=Failure.of(error))
        answer.cpu_s = time.process_time() - start
        return answer

    def _execute(self, order: Order) -> Answer:
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
                metrics, norm = self._policy(order).update(order)
                sums, maxima = metrics.state
                return Answer(sums=sums, maxima=maxima, grad_norm=norm)
            case Score():
                return Answer(scores=self._policy(order).score(order))
            case Hash():
                return Answer(hash=self._policy(order).hash(frozen=order.frozen))
            case Weights():
                path = Path(order.path) if self._rank == 0 else None
                return Answer(aliases=self._write(order, path))
            case Save():
                for number, policy in enumerate(self._learners[order.learner].values()):
                    self._save(policy, Path(order.folder), number)
                return Answer()
            case Load():
                # in the checkpoint's order of policies, whose numbers are in the file names
                policies = self._learners[order.learner]
                for number, (name, steps) in enumerate(order.steps.items()):
                    policies[name].load(Path(order.folder), number, steps)
                return Answer()
        raise AssertionError(order)

    def _policy(self, order: Update | Score | Hash | Weights) -> Policy:
        return self._learners[order.learner][order.policy]

    def _write(self, order: Weights, path: Path | None) -> dict[str, str]:
        from safetensors import SafetensorError

        try:
            return self._policy(order).weights(order.kind, path)
        except (OSError, SafetensorError) as error:  # a full disk raises either
            raise CheckpointError(f"cannot write weights to {path}: {error}") from error

    def _save(self, policy: Policy, folder: Path, number: int) -> None:
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
        os._exit(1)  # a normal exit with torch's process groups is slow
