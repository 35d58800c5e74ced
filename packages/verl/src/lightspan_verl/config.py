"""What a user says of the verl learner: `learner=Verl(…)`. Loads neither torch nor verl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from lightspan.errors import ConfigError
from lightspan.protocols.learner import LearnerRequest
from lightspan.schema.validation import check_choice, check_number, check_whole
from lightspan_torch.learner.memory import FLOAT32_BYTES, training_memory

if TYPE_CHECKING:
    from lightspan_verl.learner import VerlLearner

DTYPES: Final = ("float32", "bfloat16")


class Verl(msgspec.Struct, frozen=True, kw_only=True):
    """verl's FSDP2 training as the learner: `Trainer(…, learner=Verl(python="…", ranks=2))`.

    verl and the trainer's transformers exclude each other, so verl has an environment of its own,
    and each rank is a process of it, which holds its shard of the weights and optimiser. All are
    started and ended with the run, by the trainer itself or, with `ray=`, as verl's own group of
    workers in a Ray cluster. The losses are lightspan's own.

    Raises:
        ConfigError: no interpreter; fewer ranks than 1; a value out of range; no such address.
    """

    python: str
    """The interpreter of the environment that has verl, such as `verl-env/bin/python`."""
    ranks: int = 1
    """Processes that share weights and rows: of the CPU, or of as many GPUs, by the trainer's
    `device`."""
    ray: bool | str = False
    """True: the ranks are actors of a Ray cluster on this machine, which is started for them, with
    a token and on loopback alone, and ended with them. `"HOST:PORT"` or `"auto"`: of a cluster
    that is there, whose nodes are of this machine and have verl's environment."""
    token_budget: int | None = None
    """Tokens in one forward pass of a rank, about; lower it when memory runs out. None: 2048 on a
    CPU, 4096 on a GPU."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What passes are computed in; weights and sums of gradients are float32. None: float32 on a
    CPU, bfloat16 on a GPU."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, rather than keep them."""
    param_offload: bool = False
    """Hold weights and gradients in the host's memory between passes, as verl has it."""
    optimizer_offload: bool = False
    """The same of the optimiser's state."""
    start_s: float = 600.0
    """How long the ranks may take until they have loaded the model."""
    timeout_s: float = 1800.0
    """How long anything else may take: a hung rank ends the run after that."""

    def __post_init__(self) -> None:
        if not isinstance(self.python, str) or not self.python:
            raise ConfigError(
                f"Verl: python={self.python!r} must be the path of the interpreter that has verl, "
                "such as verl-env/bin/python"
            )
        check_whole("Verl: ranks", self.ranks, 1)
        _check_ray(self.ray)
        if self.token_budget is not None:
            check_whole("Verl: token_budget", self.token_budget, 1)
        if self.dtype is not None:
            check_choice("Verl: dtype", self.dtype, DTYPES)
        for name in ("gradient_checkpointing", "param_offload", "optimizer_offload"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"Verl: {name}={getattr(self, name)!r} must be True or False")
        check_number("Verl: start_s", self.start_s, above=0)
        check_number("Verl: timeout_s", self.timeout_s, above=0)

    def check(self, device: str) -> None:
        """See `LearnerSpec.check`."""
        self.placed(device)

    def build(self, request: LearnerRequest) -> VerlLearner:
        """See `LearnerSpec.build`."""
        from lightspan_verl.learner import described

        return described(
            self,
            request.models,
            device=request.device,
            optimizer=request.optimizer,
            lora=request.lora,
            critic=request.critic,
            seed=request.seed,
        )

    def describe(self, device: str) -> str:
        """See `LearnerSpec.describe`."""
        devices = self.placed(device)
        ranks = "1 rank" if len(devices) == 1 else f"{len(devices)} ranks"
        text = f"starting {ranks} of the learner: {', '.join(devices)}"
        if not self.ray:
            return text
        own = self.ray is True
        return (
            f"{text} in {'a Ray cluster on this machine' if own else f'the Ray cluster {self.ray}'}"
        )

    def placed(self, device: str) -> tuple[str, ...]:
        """The device of each rank.

        Args:
            device: the trainer's.

        Raises:
            ConfigError: a numbered device for several ranks, or beside Ray.
        """
        if self.ray and ":" in device:
            raise ConfigError(
                f"Verl: device={device!r} names a GPU, and Ray gives each rank its own: give "
                "device='cuda', or leave ray= out"
            )
        if self.ranks == 1 or device == "cpu":
            return (device,) * self.ranks
        if device != "cuda":
            raise ConfigError(
                f"Verl: {self.ranks} ranks cannot all be on device={device!r}: give device='cuda' "
                f"for the first {self.ranks} GPUs, or ranks=1"
            )
        return tuple(f"cuda:{number}" for number in range(self.ranks))

    def memory(self, parameters: int, lora: int, *, device: str, reference: bool) -> dict[str, int]:
        """Return part → bytes of all ranks together, which hold shards in float32.

        Args:
            parameters: of a policy's model.
            lora: parameters of LoRA beside them; 0: the model's own are trained.
            device: the trainer's.
            reference: whether there is a KL term.
        """
        return training_memory(parameters, lora, weight_bytes=FLOAT32_BYTES, reference=reference)


def _check_ray(ray: object) -> None:
    if isinstance(ray, bool):
        return
    if not isinstance(ray, str) or not ray or ray == "local":
        raise ConfigError(
            f"Verl: ray={ray!r} must be True for a Ray cluster that is started for the ranks, the "
            "address of one that is there ('HOST:PORT' or 'auto'), or False"
        )
    if "://" in ray:
        raise ConfigError(
            f"Verl: ray={ray!r}: ranks go by Ray itself, not by Ray Client: make this machine a "
            "node of the cluster (`ray start --address=HOST:PORT`), and name HOST:PORT"
        )
    host, _, port = ray.rpartition(":")
    if ray != "auto" and not (host and port.isdecimal()):
        raise ConfigError(f"Verl: ray={ray!r} must be 'HOST:PORT', such as '10.0.0.5:6379'")
