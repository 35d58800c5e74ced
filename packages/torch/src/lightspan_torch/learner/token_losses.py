"""Heads: what is made of the hidden states of a pass: log-probabilities, or the loss's gradient.

Only some tokens of a row are *looked at*: those that are trained, or scored. Their logits are most
of the memory, so a head makes them part by part, and none outlives its part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, compress, pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Loss, PolicyLoss
from lightspan_torch.learner import losses
from lightspan_torch.learner.call_index import number_calls
from lightspan_torch.learner.masks import Replays, forbidden, mask_table
from lightspan_torch.learner.metrics import MetricAccumulator
from lightspan_torch.learner.objective import TokenValues, policy_losses
from lightspan_torch.learner.policy_model import TrainedModel
from lightspan_torch.learner.tree_forward import Head, Pass

LOGITS: Final = 2**24
"""How many logits exist at once."""


class SelectedTokens:
    """The looked-at tokens of rows, row after row: N in all.

    Args:
        masks: for each row, which tokens are looked at; the first never is.
        replays: those of the rows' policy, for tokens that were sampled under a grammar.
        old_logprobs: for each row, as `Learner.update` takes them.
        fresh_version: that of the weights about to be updated; None: no engine has these weights.

    Raises:
        DataError: tokens do not follow their grammar.

    Attributes:
        looked: of each row, the places of its looked-at tokens
        targets, temperatures, advantages, weights, behaviour: [N]
        fresh: [N], True where the very weights that are about to be updated sampled the token
        old, base: [N] or None
        call_ratios: [N] or None, GSPO's ratio of the token's call
        call_importance: [N] or None, the importance weight of the token's call
    """

    def __init__(
        self,
        rows: Sequence[Row],
        masks: Sequence[Sequence[bool]],
        device: torch.device,
        replays: Replays,
        old_logprobs: Sequence[Sequence[float]] | None = None,
        fresh_version: int | None = None,
    ) -> None:
        self.rows = rows
        self.looked = [list(compress(range(len(mask)), mask)) for mask in masks]
        floats = functools.partial(torch.tensor, dtype=torch.float32, device=device)
        integers = functools.partial(torch.tensor, dtype=torch.int64, device=device)

        def gather(lists: Iterable[Sequence[Any]]) -> list[Any]:
            pairs = zip(lists, masks, strict=True)
            return [value for values, mask in pairs for value in compress(values, mask)]

        self.targets = integers(gather(row.ids for row in rows))
        self.temperatures = floats(gather(row.temperatures for row in rows))
        self.advantages = floats(gather(row.advantages for row in rows))
        self.weights = floats(gather(row.weights for row in rows))
        self.behaviour = floats(gather(row.logprobs for row in rows))
        versions = integers(gather(row.versions for row in rows))
        self.fresh = versions == (-1 if fresh_version is None else fresh_version)
        self.old = None if old_logprobs is None else floats(gather(old_logprobs))
        self.base: Tensor | None = None
        self.call_ratios: Tensor | None = None
        self.call_importance: Tensor | None = None
        # a token's kind: what tells distributions apart that follow the same node
        self._kinds, self._kind = _distinct(self.temperatures)
        self._allowed: Tensor | None = None
        """[kinds, bytes] the packed mask of each kind; None if no row has a grammar."""
        if any(row.constraints for row in rows):
            self._tell_masks_apart(replays, device)

    def _tell_masks_apart(self, replays: Replays, device: torch.device) -> None:
        """Make a kind of each temperature *and mask*."""
        table = mask_table(self.rows, self.looked, replays, device)
        count = len(table.distinct)
        kinds, self._kind = _distinct(self._kind * count + table.which)
        self._kinds = self._kinds[kinds // count]
        self._allowed = table.distinct[kinds % count]

    def look_at_calls(self, loss: PolicyLoss, logprobs: Callable[[], Tensor]) -> None:
        """Take what the loss needs of whole calls. A call's tokens may be in several parts of a
        pass, so it is taken before the first.

        Args:
            logprobs: [N], those of the weights about to be updated; asked where they are needed.

        Raises:
            DataError: a row does not say where its calls' tokens are.
        """
        numbers = number_calls(self.rows, self.looked, loss.of_calls)
        calls = torch.tensor(numbers, dtype=torch.int64, device=self.targets.device)
        old = self.behaviour if self.old is None else self.old
        if loss.form == "gspo":
            self.call_ratios = losses.call_ratios(logprobs(), old, calls)
        if loss.importance_level == "sequence" and loss.importance_cap is not None:
            cap = loss.importance_cap
            self.call_importance = losses.call_importance_weight(old, self.behaviour, calls, cap)

    def values(self, entries: Tensor) -> TokenValues:
        """What the loss of these tokens depends on, beside the model."""

        def chosen(of_all: Tensor | None) -> Tensor | None:
            return None if of_all is None else of_all[entries]

        return TokenValues(
            behaviour=self.behaviour[entries],
            advantages=self.advantages[entries],
            fresh=self.fresh[entries],
            old=chosen(self.old),
            base=chosen(self.base),
            call_ratios=chosen(self.call_ratios),
            call_importance=chosen(self.call_importance),
        )

    def by_row(self, values: Tensor) -> list[list[float]]:
        """[N] values as a list per row."""
        flat = values.tolist()
        ends = list(accumulate(map(len, self.looked), initial=0))
        return [flat[start:end] for start, end in pairwise(ends)]

    def parts(self, made: Pass, size: int) -> Iterator[_LogitChunk]:
        """The tokens of a pass, with at most `size` distributions a part.

        Tokens that follow the same node at the same temperature, and were chosen from the same
        tokens of the vocabulary, share a distribution.
        """
        if not len(made.entries):
            return
        kinds = len(self._kinds)
        keys = made.places * kinds + self._kind[made.entries]
        distinct, which = _distinct(keys)
        which, order = which.sort(stable=True)
        entries = made.entries[order]
        for start in range(0, len(distinct), size):
            stop = min(start + size, len(distinct))
            first, last = torch.searchsorted(which, which.new_tensor([start, stop])).tolist()
            chosen = distinct[start:stop]
            yield _LogitChunk(
                places=chosen // kinds,
                temperatures=self._kinds[chosen % kinds],
                allowed=None if self._allowed is None else self._allowed[chosen % kinds],
                which=which[first:last] - start,
                entries=entries[first:last],
            )


def _distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values, rising, and which of them each value is."""
    distinct, which = torch.unique(values, return_inverse=True)
    return distinct, which


class _LogitChunk(NamedTuple):
    """Some tokens of a pass, n of them, and the D distributions that they were drawn from."""

    places: Tensor
    """[D] the nodes of the pass that predict."""
    temperatures: Tensor
    """[D]"""
    allowed: Tensor | None
    """[D, bytes] packed masks (`lightspan_torch.learner.masks`); None: every token is allowed."""
    which: Tensor
    """[n] the token's distribution."""
    entries: Tensor
    """[n] where the token is in `SelectedTokens`."""

    def distributions(self, hidden: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
        """[D, vocabulary] log-probabilities at the tokens' temperatures, over the allowed tokens;
        -inf for all others."""
        scaled = output(hidden).float() / self.temperatures[:, None]
        if self.allowed is not None:
            scaled.masked_fill_(forbidden(self.allowed, scaled.shape[-1]), -math.inf)
        return scaled.log_softmax(-1)

    def logprobs(self, distributions: Tensor, tokens: SelectedTokens) -> Tensor:
        """[n]"""
        return distributions[self.which, tokens.targets[self.entries]]


def training_head(
    model: TrainedModel, plain: Any, tokens: SelectedTokens, loss: Loss, tally: MetricAccumulator
) -> Head:
    """A head that adds the gradient of Σ weight · loss of a pass's tokens to the weights of the
    model's own head, and returns that of the hidden states."""
    output, size = _output(model, plain)

    def head(hidden: Tensor, made: Pass) -> list[tuple[Tensor, Tensor]]:
        gradients = []
        for part in tokens.parts(made, size):
            states = hidden[part.places]
            # a leaf ends the graph here: each part goes backward, and frees its logits, by itself
            leaf = states.detach().requires_grad_(states.requires_grad)
            _backward(tokens, part, part.distributions(leaf, output), loss, tally)
            if leaf.grad is not None:
                gradients.append((states, leaf.grad))
        return gradients

    return head


def scoring_head(model: TrainedModel, plain: Any, tokens: SelectedTokens, scores: Tensor) -> Head:
    """A head that writes the tokens' log-probabilities into `scores`, [N]."""
    output, size = _output(model, plain)

    def head(hidden: Tensor, made: Pass) -> list[tuple[Tensor, Tensor]]:
        for part in tokens.parts(made, size):
            distributions = part.distributions(hidden[part.places], output)
            scores[part.entries] = part.logprobs(distributions, tokens)
        return []

    return head


def _output(model: TrainedModel, plain: Any) -> tuple[Callable[[Tensor], Tensor], int]:
    """(what makes logits of hidden states, how many hidden states at once)."""
    size = max(1, LOGITS // plain.config.get_text_config().vocab_size)
    return (plain.get_output_embeddings() if model.hidden_to_logits() else _as_is), size


def _as_is(logits: Tensor) -> Tensor:
    return logits


def logits_of(plain: Any) -> Callable[..., Tensor]:
    """`decode` of `passes.sweep` for models whose head alone does not make the logits: they come in
    place of hidden states."""

    def decode(ids: Tensor, positions: Tensor | None, tree: object) -> Tensor:
        options = {"position_ids": positions, "tree": tree}
        extra = {name: value for name, value in options.items() if value is not None}
        logits: Tensor = plain(input_ids=ids, use_cache=False, **extra).logits
        return logits

    return decode


def _backward(
    tokens: SelectedTokens,
    part: _LogitChunk,
    distributions: Tensor,
    loss: Loss,
    tally: MetricAccumulator,
) -> None:
    """Add the gradient of Σ weight · loss of a part's tokens."""
    logprobs = part.logprobs(distributions, tokens)
    tally.count(logprobs.numel())
    if isinstance(loss, PolicyLoss):
        per_token = _policy_loss(tokens, part, loss, distributions, logprobs, tally)
    else:
        per_token = losses.negative_log_likelihood(logprobs)
        with torch.no_grad():
            tally.add("entropy", losses.entropy(distributions.detach())[part.which])
    total = (tokens.weights[part.entries] * per_token).sum()
    tally.add("loss", total)
    total.backward()  # type: ignore[no-untyped-call]


def _policy_loss(
    tokens: SelectedTokens,
    part: _LogitChunk,
    loss: PolicyLoss,
    distributions: Tensor,
    logprobs: Tensor,
    tally: MetricAccumulator,
) -> Tensor:
    """[n] losses; see `lightspan_torch.learner.losses`."""
    # entropy is always reported, but a graph as large as the logits is kept only for a bonus
    with torch.set_grad_enabled(loss.entropy != 0):
        spread = losses.entropy(distributions if loss.entropy else distributions.detach())
        spread = spread[part.which]
    return policy_losses(loss, tokens.values(part.entries), logprobs, spread, tally)
