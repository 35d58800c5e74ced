"""Heads: functions that compute log-probabilities or gradients from a pass's hidden states.

The *selected* tokens of a row are those that are trained or scored. Their logits need most of the
memory, so a head computes them in chunks and frees each chunk before the next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Loss, PolicyLoss
from lightspan_torch.engine.grammars import forbidden
from lightspan_torch.learner import losses
from lightspan_torch.learner.call_index import call_setting, number_calls
from lightspan_torch.learner.masks import Replays, mask_table
from lightspan_torch.learner.metrics import MetricAccumulator
from lightspan_torch.learner.objective import TokenValues, policy_losses
from lightspan_torch.learner.policy_model import TrainedModel
from lightspan_torch.learner.tree_forward import Head, Pass

LOGITS: Final = 2**24
"""Maximum number of logits in memory at once."""


class SelectedTokens:
    """The N selected tokens of one policy's rows, row by row, with the inputs of their losses.

    Args:
        rows: the rows.
        masks: for each row, True for each selected token; the first token is never selected.
        device: device of the tensors.
        replays: computes the masks of tokens that were sampled under a grammar.
        old_logprobs: for each row, its tokens' log-probabilities before the update; None if they
            were not computed.
        fresh_version: version of the current weights; None if no engine has these weights.

    Raises:
        DataError: tokens do not follow their grammar.

    Attributes:
        selected: for each row, the positions of its selected tokens
        targets: [N] the ids of the tokens
        weights: [N] the weights of the tokens' losses
        values: the inputs of the loss, each [N] or None
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
        self.selected = [list(compress(range(len(mask)), mask)) for mask in masks]
        floats = functools.partial(torch.tensor, dtype=torch.float32, device=device)
        integers = functools.partial(torch.tensor, dtype=torch.int64, device=device)

        def gather(lists: Iterable[Sequence[Any]]) -> list[Any]:
            pairs = zip(lists, masks, strict=True)
            return [value for values, mask in pairs for value in compress(values, mask)]

        self.targets = integers(gather(row.ids for row in rows))
        self.weights = floats(gather(row.weights for row in rows))
        versions = integers(gather(row.versions for row in rows))
        self.values = TokenValues(
            behaviour=floats(gather(row.logprobs for row in rows)),
            advantages=floats(gather(row.advantages for row in rows)),
            fresh=versions == (-1 if fresh_version is None else fresh_version),
            old=None if old_logprobs is None else floats(gather(old_logprobs)),
        )
        # a token's kind is its temperature and mask: tokens of one kind that follow the same node
        # share a distribution
        temperatures = floats(gather(row.temperatures for row in rows))
        self._temperatures, self._kind = _distinct(temperatures)
        """[kinds] the temperature of each kind, and [N] the index of each token's kind."""
        self._allowed: Tensor | None = None
        """[kinds, bytes] the packed mask of each kind; None if no row has a grammar."""
        if any(row.constraints for row in rows):
            table = mask_table(rows, self.selected, replays, device)
            count = len(table.distinct)
            kinds, self._kind = _distinct(self._kind * count + table.which)
            self._temperatures = self._temperatures[kinds // count]
            self._allowed = table.distinct[kinds % count]

    def add_call_values(self, loss: PolicyLoss, logprobs: Callable[[], Tensor]) -> None:
        """Compute the inputs of the loss that are the same for all tokens of a call.

        These are GSPO's ratio, the importance weight of a call and whether it is masked. They must
        be computed before the first chunk, because a call's tokens may be in several chunks.

        Args:
            loss: the loss's settings.
            logprobs: returns the [N] log-probabilities under the current weights.

        Raises:
            DataError: a row's `responses` are missing or invalid.
        """
        numbers = number_calls(self.rows, self.selected, call_setting(loss))
        calls = torch.tensor(numbers, dtype=torch.int64, device=self.targets.device)
        behaviour = self.values.behaviour
        old = behaviour if self.values.old is None else self.values.old
        if loss.form == "gspo":
            forced = self._forced()
            ratios = losses.call_ratios(logprobs(), old, calls, forced)
            scales = None if forced is None else losses.call_scales(calls, forced)
            self.values = self.values._replace(call_ratios=ratios, call_scales=scales)
        if loss.importance_level == "sequence" and loss.importance_cap is not None:
            importance = losses.call_importance_weight(old, behaviour, calls, loss.importance_cap)
            self.values = self.values._replace(call_importance=importance)
        if loss.importance_mask is not None:
            kept = losses.call_kept(old, behaviour, calls, loss.importance_mask)
            self.values = self.values._replace(call_kept=kept)

    def _forced(self) -> Tensor | None:
        """Return [N] True for each token that was the only one its grammar allowed.

        None if no row has a grammar.
        """
        if self._allowed is None:
            return None
        sizes = (~forbidden(self._allowed, 8 * self._allowed.shape[-1])).sum(-1)
        return (sizes == 1)[self._kind]

    def by_row(self, values: Tensor) -> list[list[float]]:
        """Split the values of the N tokens into a list per row."""
        flat = values.tolist()
        ends = list(accumulate(map(len, self.selected), initial=0))
        return [flat[start:end] for start, end in pairwise(ends)]

    def chunks(self, current_pass: Pass, size: int) -> Iterator[_LogitChunk]:
        """Yield the selected tokens of a pass in chunks.

        Several tokens may be sampled from the same distribution.

        Args:
            current_pass: the pass.
            size: maximum number of distinct distributions in a chunk.
        """
        if not len(current_pass.entries):
            return
        kinds = len(self._temperatures)
        keys = current_pass.places * kinds + self._kind[current_pass.entries]
        distinct, which = _distinct(keys)
        which, order = which.sort(stable=True)
        entries = current_pass.entries[order]
        starts = range(0, len(distinct), size)
        bounds = which.new_tensor([*starts, len(distinct)])
        firsts = torch.searchsorted(which, bounds).tolist()  # at once: the CPU waits for them
        for start, (first, last) in zip(starts, pairwise(firsts), strict=True):
            stop = min(start + size, len(distinct))
            nodes, kind = distinct[start:stop] // kinds, distinct[start:stop] % kinds
            yield _LogitChunk(
                places=nodes,
                temperatures=self._temperatures[kind],
                allowed=None if self._allowed is None else self._allowed[kind],
                which=which[first:last] - start,
                entries=entries[first:last],
            )


def _distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values, ascending, and the index of each value among them."""
    distinct, which = torch.unique(values, return_inverse=True)
    return distinct, which


class _LogitChunk(NamedTuple):
    """Some of a pass's selected tokens (n), and the D distributions that they were sampled from.

    D may be less than n, because several tokens may be sampled from the same distribution.
    """

    places: Tensor
    """[D] indices of the hidden states that predict the distributions."""
    temperatures: Tensor
    """[D] the temperature of each distribution."""
    allowed: Tensor | None
    """[D, bytes] packed masks of `lightspan_torch.engine.grammars`; None if all are allowed."""
    which: Tensor
    """[n] the index of the token's distribution."""
    entries: Tensor
    """[n] the token's index among all tokens of `SelectedTokens`."""

    def distributions(self, hidden: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the log-probability of every token in each distribution, [D, vocabulary].

        The temperature of each distribution is applied. Tokens that a grammar forbids get -inf.

        Args:
            hidden: [D, hidden] hidden states at `places`.
            output: turns hidden states into logits.
        """
        scaled = output(hidden).float() / self.temperatures[:, None]
        if self.allowed is not None:
            scaled.masked_fill_(forbidden(self.allowed, scaled.shape[-1]), -math.inf)
        return scaled.log_softmax(-1)

    def logprobs(self, distributions: Tensor, tokens: SelectedTokens) -> Tensor:
        """Return the log-probabilities of the chunk's tokens, [n]."""
        return distributions[self.which, tokens.targets[self.entries]]


RowKey: TypeAlias = tuple[str, tuple[tuple[str, int], ...]]


def row_key(row: Row) -> RowKey:
    """Return the rollout and the calls of a row, which no other row of a batch has."""
    return row.rollout_id, row.call_ids


class TrainedScores(NamedTuple):
    """What a model says about the trained tokens of rows."""

    logprobs: list[list[float]]
    """For each row, the log-probabilities of its trained tokens, 0 for others."""
    states: dict[RowKey, Tensor]
    """Key of a row → [its trained tokens, hidden] states before these tokens, in main memory. Empty
    if the model's logits are not the output of its last layer alone."""


@dataclass(frozen=True)
class FrozenStates:
    """What a frozen model's next-token distributions at trained tokens are computed from.

    A hidden state takes much less memory than logits.
    """

    states: Mapping[RowKey, Tensor]
    """Key of a row (`row_key`) → [its trained tokens, hidden] states before these tokens."""
    output: Callable[[Tensor], Tensor]
    """Returns the [D, vocabulary] logits of [D, hidden] states."""

    def log_distributions(
        self, tokens: SelectedTokens, device: torch.device, vocabulary: int
    ) -> Callable[[_LogitChunk], Tensor]:
        """Return a function from a chunk to its [D, vocabulary] log-probabilities.

        Args:
            tokens: the tokens of the chunks, which are the trained ones of rows with states.
            device: device of the result.
            vocabulary: number of tokens in the result. Models of one tokenizer may have unused
                tokens at the end, of different numbers. The frozen model's further ones are left
                out, and those that it lacks get -inf.
        """
        states = torch.cat([self.states[row_key(row)] for row in tokens.rows])

        def output(hidden: Tensor) -> Tensor:
            logits = self.output(hidden)[:, :vocabulary].to(device)
            return pad(logits, (0, vocabulary - logits.shape[1]), value=-math.inf)

        @torch.no_grad()
        def distributions(chunk: _LogitChunk) -> Tensor:
            numbers = torch.arange(len(chunk.places), device=chunk.which.device)
            firsts = chunk.entries[torch.searchsorted(chunk.which, numbers)]
            return chunk.distributions(states[firsts.to(states.device)], output)

        return distributions


def training_head(
    model: TrainedModel,
    plain: Any,
    tokens: SelectedTokens,
    loss: Loss,
    metrics: MetricAccumulator,
    teacher: FrozenStates | None = None,
) -> Head:
    """Return a head that computes the gradient of Σ weight · loss over a pass's tokens.

    The head adds the gradient to the parameters of the model's output layer. It returns the
    gradient with respect to the hidden states, for the backward pass through the other layers.

    Args:
        model: the policy's model.
        plain: the transformers model of the pass.
        tokens: the selected tokens.
        loss: the loss's settings.
        metrics: the accumulator to which the tokens' metrics are added.
        teacher: a model whose reverse KL divergence is added to each token's loss; None for none.
    """
    output, size = _output(model, plain)
    vocabulary = plain.config.get_text_config().vocab_size
    device = tokens.targets.device
    of_teacher = None
    if teacher is not None:
        of_teacher = teacher.log_distributions(tokens, device, vocabulary)

    def head(hidden: Tensor, current_pass: Pass) -> list[tuple[Tensor, Tensor]]:
        gradients = []
        for chunk in tokens.chunks(current_pass, size):
            states = hidden[chunk.places]
            # a leaf ends the graph, so that each chunk's backward pass frees its logits
            leaf = states.detach().requires_grad_(states.requires_grad)
            distributions = chunk.distributions(leaf, output)
            goal = None if of_teacher is None else of_teacher(chunk)
            _backward(tokens, chunk, distributions, loss, metrics, goal)
            if leaf.grad is not None:
                gradients.append((states, leaf.grad))
        return gradients

    return head


def scoring_head(model: TrainedModel, plain: Any, tokens: SelectedTokens, scores: Tensor) -> Head:
    """Return a head that writes the log-probabilities of the selected tokens into `scores`.

    Args:
        model: the policy's model.
        plain: the transformers model of the pass.
        tokens: the N selected tokens.
        scores: [N] log-probabilities, to be filled.
    """
    output, size = _output(model, plain)

    def head(hidden: Tensor, current_pass: Pass) -> list[tuple[Tensor, Tensor]]:
        for chunk in tokens.chunks(current_pass, size):
            distributions = chunk.distributions(hidden[chunk.places], output)
            scores[chunk.entries] = chunk.logprobs(distributions, tokens)
        return []

    return head


def _output(model: TrainedModel, plain: Any) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return a function from hidden states to logits, and how many states it may get at once."""
    size = max(1, LOGITS // plain.config.get_text_config().vocab_size)
    output = plain.get_output_embeddings() if model.hidden_to_logits else torch.nn.Identity()
    return output, size


def _backward(
    tokens: SelectedTokens,
    chunk: _LogitChunk,
    distributions: Tensor,
    loss: Loss,
    metrics: MetricAccumulator,
    goal: Tensor | None,
) -> None:
    """Compute the gradient of Σ weight · loss over the tokens of a chunk, and add their metrics.

    Args:
        tokens: the selected tokens.
        chunk: the chunk.
        distributions: [D, vocabulary] the chunk's log-probabilities.
        loss: the loss's settings.
        metrics: the accumulator.
        goal: the teacher's log-probabilities, as `distributions`; None without a teacher.
    """
    logprobs = chunk.logprobs(distributions, tokens)
    metrics.count(logprobs.numel())
    # entropy is always reported, but a graph as large as the logits is needed only for a bonus
    has_bonus = isinstance(loss, PolicyLoss) and loss.entropy != 0
    with torch.set_grad_enabled(has_bonus):
        entropies = losses.entropy(distributions if has_bonus else distributions.detach())
        entropies = entropies[chunk.which]
    if isinstance(loss, PolicyLoss):
        values = tokens.values.at(chunk.entries)
        per_token = policy_losses(loss, values, logprobs, entropies, metrics)
    else:
        per_token = -logprobs
        metrics.add("entropy", entropies)
    if goal is not None:
        divergences = losses.reverse_kl(distributions, goal)[chunk.which]
        per_token = per_token + divergences
        metrics.add("reverse_kl", divergences)
    total = (tokens.weights[chunk.entries] * per_token).sum()
    metrics.add("loss", total)
    total.backward()  # type: ignore[no-untyped-call]
