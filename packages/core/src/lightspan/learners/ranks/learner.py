"""The learner that a trainer holds where there are several ranks: it is rank 0."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from lightspan.engines.protocol import TokenEngine
from lightspan.errors import ConfigError, LightspanError, RankError
from lightspan.learners.cards import card
from lightspan.learners.description import Torch
from lightspan.learners.protocol import (
    Critic,
    Learner,
    LearnerCapabilities,
    LoRA,
    Loss,
    Optimizer,
    PolicyLoss,
    Which,
)
from lightspan.learners.ranks.group import Group, GroupError, check_same, ready
from lightspan.learners.ranks.messages import (
    Answer,
    Drop,
    End,
    Load,
    Order,
    Score,
    Setup,
    States,
    Update,
    answers,
    packed,
)
from lightspan.learners.ranks.processes import Processes
from lightspan.learners.ranks.shares import shares
from lightspan.learners.ranks.steps import RankSums
from lightspan.learners.ranks.torchrun import SERVE, Meeting, started
from lightspan.learners.ranks.worker import learner_of
from lightspan.learners.sums import over_policies
from lightspan.learners.torch import PolicyStep, TorchLearner
from lightspan.lightning.rows import Row
from lightspan.lightning.transitions import TransitionKey
from lightspan.schema.tokens import TokenRecord

T = TypeVar("T")

GO_ON: Final = "What the last checkpoint holds is whole: go on with resume=True (--resume)"

_PATIENCE_S: Final = 5.0
"""How long an end waits for what is under way; the end of this process ends the others too."""


class Ranks:
    """The processes of a learner, connected: this one is rank 0.

    Args:
        devices: of each rank.
        start_s: see `Torch`.
        timeout_s: see `Torch`.

    Raises:
        ConfigError: there is one device, or none.
        RankError: a rank ended before it was there, or runs another version.
    """

    def __init__(
        self, devices: Sequence[str], *, start_s: float = 600.0, timeout_s: float = 1800.0
    ) -> None:
        if len(devices) < 2:
            raise ConfigError(
                f"Ranks: devices={list(devices)!r} are of one rank: use TorchLearner(device=…)"
            )
        self._start_s = start_s
        self._timeout_s = timeout_s
        self._lost = ""
        self._lock = threading.Lock()
        self._processes: Processes | None = None
        if started():
            meeting = Meeting()
            meeting.say(SERVE)
            others = [ready(rank) for rank in range(1, len(devices))]
            try:
                meeting.store.wait(others, timedelta(seconds=start_s))
                check_same(meeting.store, len(devices))
                self.group = Group(meeting.store, 0, devices, timeout_s=timeout_s)
            except (GroupError, RuntimeError) as error:
                raise RankError(f"a process of torchrun is lost: {error}") from error
        else:
            self._processes = Processes(devices, timeout_s=timeout_s)
            try:
                self.group = self._processes.connect(start_s=start_s)
            except BaseException:
                self._processes.end()
                raise

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started here: ranks 1 and up."""
        return [] if self._processes is None else self._processes.pids()

    def together(self, orders: Sequence[Order], own: Callable[[], T]) -> tuple[T, list[Answer]]:
        """Let ranks 1 and up do what they are ordered, one each, and do one's own part meanwhile.

        Raises:
            LightspanError: what went wrong here or there; every rank can go on.
            RankError: one is lost. Then all are ended, and nothing goes on.
        """
        if self._lost:
            raise RankError(self._lost)
        with self._lock:
            try:
                return self._together(orders, own)
            except GroupError as error:
                self._lost = f"{self._why(error, orders[0])}. {GO_ON}"
                self.end()
                raise RankError(self._lost) from error
            except LightspanError:
                raise
            except BaseException as error:  # nobody knows what the others wait for now
                self._lost = f"the learner has failed before: {error!r}"
                self.end()
                raise

    def _together(self, orders: Sequence[Order], own: Callable[[], T]) -> tuple[T, list[Answer]]:
        longest = timedelta(seconds=self._start_s) if isinstance(orders[0], Setup) else None
        for rank, order in enumerate(orders, 1):
            self.group.send(rank, packed(order), within=longest)
        failure = None
        try:
            mine = own()
        except LightspanError as error:
            failure = error
        received = [
            answers.decode(self.group.receive(rank, within=longest))
            for rank in range(1, self.group.size)
        ]
        if failure is not None:
            raise failure
        for rank, answer in enumerate(received, 1):
            if answer.failure is not None:
                raise answer.failure.error(self.group.name(rank))
        return mine, received

    def _why(self, error: GroupError, order: Order) -> str:
        if self._processes is None:
            return f"a process of torchrun is lost, whose output says why ({error})"
        self.group.close()
        limit = f"timeout_s={self._timeout_s:g}"
        if isinstance(order, Setup):
            limit = f"start_s={self._start_s:g}"
        return self._processes.failure(str(error), limit=limit, late=error.is_late)

    def end(self) -> None:
        """End the other ranks, whatever they are doing. Idempotent."""
        if self._processes is not None:
            self._processes.end()
        elif not self._lost and self._lock.acquire(timeout=_PATIENCE_S):
            self._lost = "the ranks of the learner have been ended"
            for rank in range(1, self.group.size):
                with contextlib.suppress(GroupError):  # it has ended already
                    self.group.send(rank, packed(End()))
            self._lock.release()


class RanksLearner(Learner):
    """A `TorchLearner` on several devices.

    Its state is rank 0's: versions are published, checkpoints saved and models exported from there.
    All ranks have the same weights and optimiser state, so that a checkpoint does not depend on how
    many there are.

    Args:
        models: policy → folder or hub name; ranks cannot share a model in memory.
        ranks: those that share the rows.
        own: whether `close` ends them.
        options: those of `TorchLearner`, which say the same here.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        ranks: Ranks,
        own: bool = False,
        optimizer: Optimizer | None = None,
        lora: LoRA | Mapping[str, LoRA | None] | None = None,
        dtype: str | None = None,
        token_budget: int | None = None,
        seed: int = 0,
        share_prefixes: bool = True,
        critic: Critic | None = None,
    ) -> None:
        loaded = [name for name, model in models.items() if not isinstance(model, str | Path)]
        if loaded:
            raise ConfigError(
                f"the model of policy {loaded[0]!r} is one in memory, and each rank loads its own: "
                "give a folder (save_pretrained) or a hub name"
            )
        self._ranks = ranks
        self._owns = own
        self._number = next(self._numbers)
        self._sums = RankSums(ranks.group)
        setups = [
            Setup(
                learner=self._number,
                models={name: str(model) for name, model in models.items()},
                device=device,
                threads=max(1, torch.get_num_threads() // len(ranks.group.devices)),
                optimizer=optimizer or Optimizer(),
                lora=dict(lora) if isinstance(lora, Mapping) else dict.fromkeys(models, lora),
                dtype=dtype,
                token_budget=token_budget,
                seed=seed,
                share_prefixes=share_prefixes,
                critic=critic,
            )
            for device in ranks.group.devices
        ]
        self._own, received = ranks.together(setups[1:], lambda: learner_of(setups[0], self._sums))
        self._cpu_s = [answer.cpu_s for answer in received]

    @property
    def capabilities(self) -> LearnerCapabilities:
        return self._own.capabilities

    def policies(self) -> list[str]:
        return self._own.policies()

    def usage(self) -> dict[str, float]:
        own = self._own.usage()
        return {**own, "cpu_s": own["cpu_s"] + sum(self._cpu_s)}

    def state(self) -> dict[str, Any]:
        return {**self._own.state(), "ranks": list(self._ranks.group.devices)}

    def weight_hash(self, policy: str) -> str:
        return self._own.weight_hash(policy)

    def grammar_mismatches(self, records: Sequence[TokenRecord]) -> dict[TransitionKey, str]:
        return self._own.grammar_mismatches(records)

    def score(self, rows: Sequence[Row], which: Which = "policy") -> list[list[float]]:
        self._own.check_scored(rows)
        return self._scores_and_states(rows, which, states=False)[0]

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        self._own.check_values(rows)
        return self._own.values_of(rows, self._scores_and_states(rows, None, states=True)[1])

    def score_and_values(self, rows: Sequence[Row]) -> tuple[list[list[float]], list[list[float]]]:
        self._own.check_values(rows)
        scores, states = self._scores_and_states(rows, "policy", states=True)
        return scores, self._own.values_of(rows, states)

    def _scores_and_states(
        self, rows: Sequence[Row], which: Which | None, *, states: bool
    ) -> tuple[list[list[float]], dict[str, Tensor]]:
        """As `TorchLearner.scores_and_states`, each rank with its share."""
        mine, *others = shares(rows, self._ranks.group.size, whole_rollouts=False)
        orders = [
            Score(
                learner=self._number,
                rows=[rows[index] for index in share],
                which=which,
                states=states,
            )
            for share in others
        ]
        chosen = [rows[index] for index in mine]
        own, received = self._together(
            orders, lambda: self._own.scores_and_states(chosen, which, states=states)
        )
        parts = [own]
        for answer in received:
            found = {policy: _tensor(each) for policy, each in answer.states.items()}
            parts.append((answer.scores, found))
        return _merged(rows, [mine, *others], parts)

    def update(
        self,
        rows: Sequence[Row],
        loss: Loss,
        *,
        old_logprobs: Sequence[Sequence[float]] | None = None,
    ) -> dict[str, float]:
        self._own.check_update(rows, loss, old_logprobs)
        fresh = self._own.fresh_versions(rows)
        mine, *others = (
            _Share.of(rows, old_logprobs, indices)
            for indices in shares(rows, self._ranks.group.size, whole_rollouts=True)
        )
        orders = [
            Update(
                learner=self._number,
                rows=share.rows,
                loss_of_policy=loss if isinstance(loss, PolicyLoss) else None,
                old_logprobs=share.old_logprobs,
                fresh=fresh,
            )
            for share in others
        ]
        steps, received = self._together(orders, lambda: self._take_steps(mine, loss, fresh))
        self._check_agreement(steps, received)
        parts = {
            policy: self._own.fit_critic(policy, [step, *_steps_of(policy, step, received)])
            for policy, step in steps.items()
        }
        return over_policies(parts, rows=len(rows))

    def _take_steps(
        self, share: _Share, loss: Loss, fresh: Mapping[str, int | None]
    ) -> dict[str, PolicyStep]:
        self._sums.begin(len(fresh))
        try:
            return self._own.take_steps(share.rows, loss, share.old_logprobs, fresh)
        except LightspanError as error:
            self._sums.fail(error)
            raise

    def _check_agreement(self, steps: Mapping[str, PolicyStep], received: Sequence[Answer]) -> None:
        """Raise `RankError` if ranks saw different gradients: their weights have come apart."""
        for policy, step in steps.items():
            own = step.metrics["grad_norm"]
            for rank, answer in enumerate(received, 1):
                theirs = answer.grad_norms.get(policy)
                if theirs != own and not (own != own and theirs != theirs):  # NaN is none of these
                    raise RankError(
                        f"{self._ranks.group.name(rank)} has the gradient norm {theirs} for policy "
                        f"{policy}, and rank 0 has {own}: their weights have come apart. {GO_ON}"
                    )

    async def publish(self, engine: TokenEngine, versions: Mapping[str, int]) -> None:
        await self._own.publish(engine, versions)

    def save(self, folder: Path) -> None:
        self._own.save(folder)

    def load(self, folder: Path) -> None:
        order = Load(learner=self._number, folder=str(Path(folder).absolute()))
        orders = [order] * (self._ranks.group.size - 1)
        self._together(orders, lambda: self._own.load(folder))

    def export(self, policy: str, folder: Path, *, merge: bool = False) -> None:
        self._own.export(policy, folder, merge=merge)

    def close(self) -> None:
        """Let the other ranks forget this learner, or end them if they are its own. Idempotent."""
        if self._owns:
            self._ranks.end()
        else:
            orders = [Drop(learner=self._number)] * (self._ranks.group.size - 1)
            self._ranks.together(orders, lambda: None)

    def _together(self, orders: Sequence[Order], own: Callable[[], T]) -> tuple[T, list[Answer]]:
        mine, received = self._ranks.together(orders, own)
        used = [answer.cpu_s for answer in received]
        self._cpu_s = [max(*pair) for pair in zip(self._cpu_s, used, strict=True)]
        return mine, received


class _Share:
    """What one rank has of an update."""

    def __init__(self, rows: list[Row], old_logprobs: list[list[float]] | None) -> None:
        self.rows = rows
        self.old_logprobs = old_logprobs

    @staticmethod
    def of(
        rows: Sequence[Row],
        old_logprobs: Sequence[Sequence[float]] | None,
        indices: Sequence[int],
    ) -> _Share:
        """That of these indices."""
        old = None if old_logprobs is None else [list(old_logprobs[index]) for index in indices]
        return _Share([rows[index] for index in indices], old)


def _merged(
    rows: Sequence[Row],
    indices: Sequence[Sequence[int]],
    parts: Sequence[tuple[list[list[float]], Mapping[str, Tensor]]],
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """What ranks found of their rows, in the order of all rows.

    Args:
        indices: for each rank, those of its rows.
        parts: of each rank, as `TorchLearner.scores_and_states`.
    """
    scores: dict[int, list[float]] = {}
    by_row: dict[int, Tensor] = {}
    for chosen, (found, states) in zip(indices, parts, strict=True):
        if found:
            scores.update(zip(chosen, found, strict=True))
        for policy, tensor in states.items():
            own = [index for index in chosen if rows[index].policy == policy]
            calls = [len(rows[index].responses) for index in own]
            by_call = tensor.cpu().split(calls)  # type: ignore[no-untyped-call]
            by_row.update(zip(own, by_call, strict=True))
    policies = dict.fromkeys(rows[index].policy for index in sorted(by_row))
    merged = {
        policy: torch.cat([by_row[i] for i in sorted(by_row) if rows[i].policy == policy])
        for policy in policies
    }
    return [scores[index] for index in sorted(scores)], merged


def _steps_of(policy: str, own: PolicyStep, received: Sequence[Answer]) -> list[PolicyStep]:
    """What other ranks did to a policy."""
    found = [answer.states[policy] for answer in received if policy in answer.states]
    return [PolicyStep(own.metrics, _tensor(each), each.targets) for each in found]


def _tensor(states: States) -> Tensor:
    """[C, hidden]"""
    if not states.data:
        return torch.zeros(0, states.hidden)
    return torch.frombuffer(bytearray(states.data), dtype=torch.float32).view(-1, states.hidden)


def described(
    description: Torch, models: Mapping[str, Any], *, device: str, **options: Any
) -> TorchLearner | RanksLearner:
    """The learner that a description stands for, its other ranks started.

    Args:
        device: the trainer's.
        options: those of `TorchLearner` that the algorithm decides.

    Raises:
        ConfigError: see `Torch.placed`; or a device that there is not.
        RankError: a rank ended before it was there.
    """
    devices = description.placed(device, started=started())
    if len(devices) > 1 and not torch.distributed.is_available():
        raise ConfigError(
            f"Torch: {len(devices)} ranks need torch.distributed, which torch {torch.__version__} "
            "was built without: use ranks=1, or another build of torch"
        )
    chosen = {
        **options,
        "token_budget": description.token_budget,
        "share_prefixes": description.share_prefixes,
    }
    for each in devices:
        if each.startswith("cuda"):
            card(each, "Torch")
    if len(devices) == 1:
        dtype = None if description.dtype is None else getattr(torch, description.dtype)
        return TorchLearner(models, device=devices[0], dtype=dtype, **chosen)
    for each in devices:
        check_here(each)
    ranks = Ranks(devices, start_s=description.start_s, timeout_s=description.timeout_s)
    try:
        return RanksLearner(models, ranks=ranks, own=True, dtype=description.dtype, **chosen)
    except BaseException:
        ranks.end()
        raise


def check_here(device: str) -> None:
    """Raise `ConfigError` for a device that this machine does not have."""
    from lightspan.engines.weights import check_device

    check_device(device)
    if device.startswith("cuda"):
        count, number = torch.cuda.device_count(), torch.device(device).index or 0
        if number >= count:
            raise ConfigError(
                f"Torch: a rank is to be on {device!r}, and torch sees {count} GPUs on this "
                "machine: take fewer ranks, or name others in devices="
            )
