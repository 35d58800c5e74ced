"""Prefix trees: unit tests, and that trees, single rows and the formulas give the same results."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightspan.lightning.rows import common_prefix
from lightspan.protocols.learner import LoRA, Loss, PolicyLoss, SFTLoss
from lightspan_testing.families import make_family
from lightspan_testing.learner_suite import (
    BOTH_CLIPS,
    make_branching_rows,
    make_call_rows,
    reference_loss,
    token_logprobs,
)
from lightspan_torch.learner import prefix_tree, tree_forward
from lightspan_torch.learner.torch import TorchLearner
from packages.torch.tests.learner.gradients import (
    assert_close,
    gradients,
    gradients_of,
    make_model,
)

IDS = st.lists(st.integers(1, 3), min_size=1, max_size=9)
SEQUENCES = st.lists(IDS, min_size=1, max_size=9)
COSTS = st.sampled_from([0.0, 0.01, 0.3, 2.0, 50.0])

FAMILIES: dict[str, dict[str, Any]] = {
    "tied": {"kind": "Qwen2", "tie_word_embeddings": True},
    "untied, grouped": {"kind": "Qwen2", "tie_word_embeddings": False, "num_key_value_heads": 2},
    "llama": {"kind": "Llama", "tie_word_embeddings": False, "num_key_value_heads": 1},
    "qwen3": {"kind": "Qwen3", "tie_word_embeddings": True, "head_dim": 16},
}


# --- the pure part ----------------------------------------------------------------------------
def prefixes(sequences: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(ids[:size]) for ids in sequences for size in range(1, len(ids) + 1)}


def whole_tree(sequences: Sequence[list[int]]) -> prefix_tree.Tree:
    """Return one tree of all sequences: with free attention, everything is shared."""
    (tree,) = prefix_tree.share(sequences, pair_cost=0.0)
    return tree


def test_a_tree_by_hand() -> None:
    """Two answers to one prompt, a longer history, and a sequence that ends inside another one."""
    sequences = [[1, 2, 3], [1, 2, 4, 5, 6], [1, 2, 4], [1, 2, 4, 7]]
    tree = whole_tree(sequences)
    assert tree == prefix_tree.Tree(members=[1, 3, 2, 0], starts=[0, 3, 3, 2], size=7)
    layout = prefix_tree.lay_out(tree, sequences)
    assert layout.tokens == [1, 2, 4, 5, 6, 7, 3]
    assert layout.depths == [0, 1, 2, 3, 4, 3, 2]
    assert layout.ends == [7, 7, 6, 5, 5, 6, 7]
    assert layout.paths == [[0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2], [0, 1, 6]]


def test_what_is_not_worth_sharing_is_not_shared() -> None:
    """With one common token, sharing saves less than the additional attention costs."""
    sequences = [[1, *[n] * 50] for n in (2, 3)]
    assert len(prefix_tree.share(sequences, pair_cost=0.001)) == 2
    assert len(prefix_tree.share(sequences, pair_cost=0.0)) == 1
    common = [[*range(50), n] for n in (60, 61)]
    assert len(prefix_tree.share(common, pair_cost=0.001)) == 1


@given(SEQUENCES)
def test_depth_first_order(sequences: list[list[int]]) -> None:
    order = prefix_tree.depth_first(sequences)
    assert sorted(index for index, _ in order) == list(range(len(sequences)))
    for place, (index, shared) in enumerate(order):
        before = [common_prefix(sequences[i], sequences[index]) for i, _ in order[:place]]
        assert shared == max(before, default=0)
        assert not before or shared == before[-1]
    assert len(sequences[order[0][0]]) == max(map(len, sequences))


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_the_order_is_that_of_sequences(sequences: list[list[int]], rng: random.Random) -> None:
    shuffled = rng.sample(sequences, len(sequences))
    orders = [
        [(given[index], shared) for index, shared in prefix_tree.depth_first(given)]
        for given in (sequences, shuffled)
    ]
    assert orders[0] == orders[1]


@given(SEQUENCES, COSTS, st.integers(1, 12))
def test_sequences_in_trees(sequences: list[list[int]], pair_cost: float, block: int) -> None:
    found = prefix_tree.share(sequences, pair_cost=pair_cost, block=block)
    assert sorted(i for tree in found for i in tree.members) == list(range(len(sequences)))
    for tree in found:
        assert tree.starts[0] == 0
        assert tree.size == len(prefixes([sequences[index] for index in tree.members]))
    assert sum(tree.size for tree in found) <= sum(map(len, sequences))


@given(SEQUENCES)
def test_nodes_are_prefixes(sequences: list[list[int]]) -> None:
    tree = whole_tree(sequences)
    layout = prefix_tree.lay_out(tree, sequences)
    spelt: dict[int, tuple[int, ...]] = {}
    for index, path in zip(tree.members, layout.paths, strict=True):
        assert [layout.tokens[node] for node in path] == sequences[index]
        assert [layout.depths[node] for node in path] == list(range(len(path)))
        for size, node in enumerate(path, 1):
            assert spelt.setdefault(node, tuple(sequences[index][:size])) == spelt[node]
    assert sorted(spelt) == list(range(tree.size))
    assert len(set(spelt.values())) == tree.size == len(prefixes(sequences))
    for i in range(tree.size):
        for j in range(tree.size):
            is_ancestor = spelt[j][: len(spelt[i])] == spelt[i]
            assert (i <= j < layout.ends[i]) == is_ancestor


@settings(max_examples=300)
@given(SEQUENCES, st.integers(1, 12), st.integers(1, 100))
def test_pieces(sequences: list[list[int]], budget: int, mask_budget: int) -> None:
    layout = prefix_tree.lay_out(whole_tree(sequences), sequences)
    pieces = prefix_tree.cut(layout, budget, mask_budget)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == len(layout.tokens)
    longest = max(map(len, sequences))
    last_use = [0] * len(pieces)
    for number, piece in enumerate(pieces):
        assert piece.start < piece.stop
        assert piece.stop - piece.start <= max(budget, longest)
        above = {i for j in range(piece.start, piece.stop) for i in range(piece.start)}
        above = {i for i in above if any(i <= j < layout.ends[i] for j in range(*piece[:2]))}
        assert piece.past == sorted(above)
        source = prefix_tree.source(pieces, number)
        assert (source is None) == (not piece.past)
        if source is not None:
            last_use[source.piece] = number
            owner = pieces[source.piece]
            keys = [*owner.past, *range(owner.start, owner.stop)]
            assert [node for part in source.intervals for node in keys[slice(*part)]] == piece.past
    opened: list[int] = []
    for number in range(len(pieces)):
        opened.append(number)
        needed = sum(pieces[p].stop - pieces[p].start for p in opened)
        assert needed <= longest + budget
        while opened and last_use[opened[-1]] <= number:
            opened.pop()
    assert not opened


# --- through models ---------------------------------------------------------------------------


EVERYTHING = PolicyLoss(clip_low=0.2, clip_high=0.28, dual_clip=1.4, kl=0.1, entropy=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("loss", [EVERYTHING, SFTLoss()], ids=["policy", "sft"])
def test_trees_lora_and_plain_rows_agree(family: str, lora: LoRA | None, loss: Loss) -> None:
    """Loss and gradients are the same in trees, in trees cut into pieces, and row by row.

    Both clips are active; depths and temperatures differ.
    """
    model = make_model(**FAMILIES[family])
    rows = make_branching_rows(model, long=260)
    plain = TorchLearner({"writer": model}, lora=lora, share_prefixes=False)
    metrics, expected = gradients(plain, rows, loss)
    if isinstance(loss, PolicyLoss):
        assert 0.1 < metrics["clip_fraction"] < 0.9
    for budget in (2048, 90):
        learner = TorchLearner({"writer": model}, lora=lora, token_budget=budget)
        assert learner.state()["share_prefixes"] == {"writer": "in trees"}
        found, caught = gradients(learner, rows, loss)
        assert_close(caught, expected)
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_agree_with_the_formulas(family: str) -> None:
    model, trained = make_model(**FAMILIES[family]), make_model(**FAMILIES[family])
    rows = make_branching_rows(model)
    _, found = gradients(TorchLearner({"writer": model}), rows, EVERYTHING)
    total = reference_loss(trained, rows, EVERYTHING, base=model)
    total.backward()  # type: ignore[no-untyped-call]
    assert_close(found, gradients_of(trained))


@settings(max_examples=20, deadline=None)
@given(
    SEQUENCES,
    COSTS,
    st.integers(1, 30),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_any_tree_agrees_with_its_sequences(
    sequences: list[list[int]], pair_cost: float, budget: int, block: int, rng: random.Random
) -> None:
    """A random linear function of the hidden states has the same gradient for any cut of trees."""
    model = make_model("Qwen2", num_key_value_heads=2)
    looked = [[place for place in range(1, len(ids)) if rng.random() < 0.7] for ids in sequences]
    count = sum(map(len, looked))
    if not count:
        return
    directions = torch.randn(count, 32)

    def run(
        grown: list[prefix_tree.Tree], block: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        states = torch.zeros(count, 32)

        def head(hidden: torch.Tensor, made: tree_forward.Pass) -> list[Any]:
            states[made.entries] = hidden[made.places].detach()
            return [(hidden[made.places], directions[made.entries])]

        planned = tree_forward.plan(sequences, looked, grown, budget, torch.device("cpu"), block)
        entries = torch.cat([made.entries for made in planned])
        assert sorted(entries.tolist()) == list(range(count))
        tree_forward.sweep(planned, tree_forward.decoder(model, in_trees=True), head)
        named = model.named_parameters()
        return states, {n: p.grad.clone() for n, p in named if p.grad is not None}

    expected = run(prefix_tree.plain(sequences), prefix_tree.BLOCK)
    states, found = run(prefix_tree.share(sequences, pair_cost=pair_cost, block=block), block)
    assert torch.allclose(states, expected[0], atol=1e-5)
    assert set(found) == set(expected[1])
    for name, gradient in expected[1].items():
        assert torch.allclose(found[name], gradient, atol=1e-5 * float(1 + gradient.norm())), name


def test_every_shared_token_goes_through_the_model_once() -> None:
    model = make_model("Qwen2")
    rows = [row for row in make_branching_rows(model, long=800) if len(row.ids) > 256]
    distinct = len(prefixes([row.ids for row in rows]))
    assert distinct < 0.5 * sum(len(row.ids) for row in rows)
    for budget, count in ((2048, 1), (90, 3)):
        learner = TorchLearner({"writer": model}, token_budget=budget)
        seen: list[int] = []
        embedding = learner._models["writer"].plain.get_input_embeddings()
        embedding.register_forward_hook(lambda _, given, __, to=seen: to.append(given[0].numel()))
        learner.update(rows, BOTH_CLIPS)
        assert sum(seen) == distinct
        assert len(seen) == count


@pytest.mark.parametrize("logits", [1, 7])
def test_logits_in_parts(monkeypatch: pytest.MonkeyPatch, logits: int) -> None:
    """Chunks have one or seven distributions, so that a call is spread over chunks and passes."""
    model = make_model("Qwen2")
    rows = make_call_rows(model)
    loss = PolicyLoss(form="gspo", clip_low=0.9, clip_high=9.0, kl=0.1, entropy=0.1)
    _, expected = gradients(TorchLearner({"writer": model}), rows, loss)
    monkeypatch.setattr("lightspan_torch.learner.token_losses.LOGITS", logits * 405)
    learner = TorchLearner({"writer": model}, token_budget=16)
    assert_close(gradients(learner, rows, loss)[1], expected)


@pytest.mark.parametrize("budget", [4096, 1])
def test_keys_that_are_repeated_for_their_heads(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """As on a GPU: the gradients are those of heads that share their keys."""
    model = make_model("Qwen2", num_key_value_heads=2)
    rows = make_branching_rows(model)
    plain = TorchLearner({"writer": model}, share_prefixes=False)
    _, expected = gradients(plain, rows, BOTH_CLIPS)
    repeats = "lightspan_torch.learner._tree_attention._repeats_keys"
    monkeypatch.setattr(repeats, lambda query, mask: True)
    learner = TorchLearner({"writer": model}, token_budget=budget)
    assert_close(gradients(learner, rows, BOTH_CLIPS)[1], expected)


# --- where trees cannot be --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kind": "Gemma2", "head_dim": 8}, "sliding_attention|attention is"),
        ({"kind": "Mistral", "sliding_window": 16}, "sliding"),
        ({"kind": "Qwen2", "attn_implementation": "eager"}, "eager, not sdpa"),
        (
            {
                "kind": "Llama",
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            },
            "dynamic",
        ),
    ],
    ids=["gemma", "window", "eager", "rope"],
)
def test_other_models_fall_back_to_plain_rows(options: dict[str, Any], why: str) -> None:
    model = make_model(**options)
    rows = make_branching_rows(model)
    learner = TorchLearner({"writer": model})
    said = learner.state()["share_prefixes"]["writer"]
    assert said.startswith("each row by itself: ")
    assert re.search(why, said)
    plain = TorchLearner({"writer": model}, share_prefixes=False)
    _, expected = gradients(plain, rows, SFTLoss())
    assert_close(gradients(learner, rows, SFTLoss())[1], expected)


def test_a_model_that_ignores_the_tree_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's decoder drops the argument `tree`."""
    model = make_model("Qwen2")
    assert tree_forward.tree_refusal(model) == ""
    forward = model.model.forward

    def deaf(input_ids: torch.Tensor, use_cache: bool, **options: Any) -> Any:
        return forward(input_ids=input_ids, use_cache=use_cache)

    monkeypatch.setattr(model.model, "forward", deaf)
    assert "differ" in tree_forward.tree_refusal(model)


def test_a_model_that_fails_on_a_tree_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Qwen2")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr("lightspan_torch.learner._tree_attention.attend", refuse)
    assert tree_forward.tree_refusal(model) == "a tree raised TypeError: no such argument"
    assert model.config._attn_implementation == "sdpa"


def test_scores_that_a_tree_would_ignore_are_found_out() -> None:
    """An argument of the attention may act only on sequences longer than those of the check."""
    model = make_model("Qwen2")
    model.model.layers[1].self_attn.sliding_window = 512
    assert "its attention has sliding_window" in tree_forward.tree_refusal(model)


def test_rows_whose_length_changes_their_first_tokens_are_not_padded() -> None:
    model = make_family("Phi3 longrope", 405, "sdpa")
    rows = make_branching_rows(model, long=100)
    learner = TorchLearner({"writer": model})
    expected = [token_logprobs(model, row).tolist() for row in rows]
    for found, scores in zip(learner.score(rows), expected, strict=True):
        assert found == pytest.approx(scores, abs=1e-4)


def test_dropout_is_drawn_for_each_row() -> None:
    """Rows are computed alone, because in a tree the shared tokens would have the same dropout."""
    model = make_model("Qwen2")
    rows = make_branching_rows(model)
    adapters = LoRA(rank=4, dropout=0.3)
    learner, plain = (
        TorchLearner({"writer": model}, lora=adapters, share_prefixes=on) for on in (True, False)
    )
    assert "dropout" in learner.state()["share_prefixes"]["writer"]
    assert learner.update(rows, BOTH_CLIPS) == plain.update(rows, BOTH_CLIPS)
    assert learner.weight_hash("writer") == plain.weight_hash("writer")
