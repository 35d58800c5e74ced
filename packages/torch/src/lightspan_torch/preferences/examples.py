"""Convert verdicts and pairs to token ids, and make the examples of KTO and DPO from them."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from lightspan.errors import DataError
from lightspan.schema.images import PromptImage, prompt_key
from lightspan.schema.token_records import pack_ids
from lightspan.schema.validation import is_number
from lightspan_torch.engine.tokenizer import TransformersTokenizer
from lightspan_torch.preferences.rated_calls import RatedCall
from lightspan_torch.sft.image_column import with_images
from lightspan_torch.sft.rendering import (
    NOT_FOR_THIS_MODEL,
    Demonstration,
    render_or_leave_out,
)

ROUNDING: Final = 1e-9
"""Difference of equal scores by rounding, absolute and relative to the larger one."""
SAME_ANSWERS: Final = "pairs of the same answer twice"
FOREIGN: Final = "with token ids of another tokenizer"
UNPAIRED: Final = "without another answer to the same prompt, rated differently"


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt, an answer and whether it is desirable, as token ids."""

    prompt_ids: list[int]
    response_ids: list[int]
    desirable: bool
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt, with their bytes."""


class Pair(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt, the better and the worse of two answers, as token ids."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt, with their bytes."""


def prompt_identity(example: Demonstration | Verdict | Pair) -> tuple[int, ...]:
    """Return a prompt's ids, in which bits of their digests replace the placeholders of images.

    Only equal prompts have equal identities (`lightspan.schema.images.prompt_key`).
    """
    if not example.images:
        return tuple(example.prompt_ids)
    key = prompt_key(pack_ids(example.prompt_ids), example.images)
    return struct.unpack(f"<{len(example.prompt_ids)}i", key)


_Ids = TypeVar("_Ids", bound=Verdict | Pair)


@dataclass(slots=True)
class Rated:
    """Answers with scores or in pairs, as token ids, and what was left out."""

    answers: list[tuple[Demonstration, float]] = field(default_factory=list)
    """Answers with their scores."""
    pairs: list[Pair] = field(default_factory=list)
    """Answers that were given as pairs."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason → number of answers or pairs that are not used."""
    example: str = ""
    """Why one of those that the model cannot read was left out; empty if there is none."""

    def add_stored(self, calls: Iterable[RatedCall], tokenizer: TransformersTokenizer) -> None:
        """Add the rated calls of a store. Calls that do not suit the model are left out."""
        calls = list(calls)
        foreign = _foreign_policies(calls, tokenizer)
        for index, call in enumerate(calls):
            if isinstance(call.answer, Demonstration) and call.policy in foreign:
                self.left_out[FOREIGN] += 1
                self.example = f" ({foreign[call.policy]})"
                continue
            demo = self._render(call.answer, tokenizer, f"call {index}", is_strict=False)
            if demo is not None and call.is_cut and demo.response_ids[-1] in tokenizer.eos_ids:
                ids = demo.response_ids[:-1]  # the model did not end here
                demo = msgspec.structs.replace(demo, response_ids=ids) if ids else None
            if demo is not None:
                self.answers.append((demo, call.score))

    def add_passed(self, examples: Sequence[Any], tokenizer: TransformersTokenizer) -> None:
        """Add the verdicts and pairs that were passed to `fit`.

        Raises:
            DataError: an example is malformed.
        """
        for index, example in enumerate(examples):
            label = f"examples[{index}]"
            if isinstance(example, Pair | Verdict):
                example = _checked(example, label)
            if isinstance(example, Pair):
                chosen, rejected = (
                    self._render(_demonstration(example, ids), tokenizer, label)
                    for ids in (example.chosen_ids, example.rejected_ids)
                )
                self._add_pair(chosen, rejected)
            elif isinstance(example, Verdict):
                demo = _demonstration(example, example.response_ids)
                self._add_verdict(demo, _certain(example.desirable), tokenizer, label)
            else:
                self._add_chat(example, tokenizer, label)

    def _add_chat(self, example: Any, tokenizer: TransformersTokenizer, label: str) -> None:
        """Add a verdict or a pair in one of the forms of chats that `Preferences.fit` lists."""
        if not isinstance(example, Mapping):
            raise DataError(f"{label} must be an object with messages, not {example!r:.200}")
        prompt, tools = _prompt(example, label)
        names = ("chosen", "rejected")
        if "preferred_output" in example or "non_preferred_output" in example:
            names = ("preferred_output", "non_preferred_output")
        if any(name in example for name in names):
            chosen, rejected = (
                self._render(
                    {"messages": [*prompt, _answer(example, name, label)], "tools": tools},
                    tokenizer,
                    label,
                )
                for name in names
            )
            self._add_pair(chosen, rejected)
            return
        if "completion" in example:
            prompt = [*prompt, _answer(example, "completion", label)]
        score = _score(example, label)
        self._add_verdict({"messages": prompt, "tools": tools}, score, tokenizer, label)

    def _add_verdict(
        self, answer: Any, score: float, tokenizer: TransformersTokenizer, label: str
    ) -> None:
        demo = self._render(answer, tokenizer, label)
        if demo is not None:
            self.answers.append((demo, score))

    def _add_pair(self, chosen: Demonstration | None, rejected: Demonstration | None) -> None:
        if chosen is None or rejected is None:
            return
        if chosen.response_ids == rejected.response_ids:
            self.left_out[SAME_ANSWERS] += 1
            return
        self.pairs.append(_pair(chosen, rejected))

    def _render(
        self, answer: Any, tokenizer: TransformersTokenizer, label: str, *, is_strict: bool = True
    ) -> Demonstration | None:
        """Return a prompt and its answer as token ids; None if they are left out.

        Args:
            answer: a chat, or token ids.
            tokenizer: the model's tokenizer.
            label: name of the example for error messages.
            is_strict: whether a malformed chat is an error; otherwise it is left out.

        Raises:
            DataError: the chat is malformed.
        """
        demo, reason = render_or_leave_out(
            answer, tokenizer, label, "last", self.left_out, is_strict=is_strict
        )
        if reason:
            self.example = f" ({reason})"
        if demo is not None and isinstance(answer, Demonstration):
            highest = max(*demo.prompt_ids, *demo.response_ids)
            lowest = min(*demo.prompt_ids, *demo.response_ids)
            if lowest < 0 or highest >= len(tokenizer.tokenizer):
                self.left_out[NOT_FOR_THIS_MODEL] += 1
                self.example = (
                    f" ({label} has the token {lowest if lowest < 0 else highest}, but the model's "
                    f"tokenizer has {len(tokenizer.tokenizer)}: it is of another tokenizer)"
                )
                return None
        return demo


def _demonstration(example: Verdict | Pair, response_ids: list[int]) -> Demonstration:
    """Return the prompt of an example with one of its answers."""
    return Demonstration(
        prompt_ids=example.prompt_ids, response_ids=response_ids, images=example.images
    )


def _pair(chosen: Demonstration, rejected: Demonstration) -> Pair:
    """Return the pair of two answers to one prompt."""
    return Pair(
        prompt_ids=chosen.prompt_ids,
        chosen_ids=chosen.response_ids,
        rejected_ids=rejected.response_ids,
        images=chosen.images,
    )


def _foreign_policies(
    calls: Sequence[RatedCall], tokenizer: TransformersTokenizer
) -> dict[str, str]:
    """Return the policies whose token ids are of another tokenizer: name → why.

    They are those of whose answers less than half contain the recorded text when they are decoded.
    Single answers prove nothing: a character can be cut off, and a short text occurs by chance.
    """
    agree: dict[str, list[bool]] = defaultdict(list)
    reasons: dict[str, str] = {}
    for call in calls:
        if not isinstance(call.answer, Demonstration) or not (text := _letters(call.text)):
            continue
        ids = [id for id in call.answer.response_ids if 0 <= id < len(tokenizer.tokenizer)]
        decoded = tokenizer.decode(ids)
        agree[call.policy].append(text in _letters(decoded))
        if not agree[call.policy][-1]:
            reasons[call.policy] = (
                f"an answer of policy {call.policy!r} is {call.text!r:.80}, but its token ids are "
                f"{decoded!r:.80} by the model's tokenizer: give the model of that training"
            )
    return {name: reasons[name] for name, each in agree.items() if sum(each) * 2 < len(each)}


def _letters(text: str) -> str:
    """Return a text without spaces and without characters that could not be decoded."""
    return "".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split())


def _checked(example: _Ids, label: str) -> _Ids:
    """Return a verdict or pair whose fields have their types.

    Raises:
        DataError: a field has another type, such as a text in place of `True`.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(example), type(example))
    except (msgspec.ValidationError, TypeError) as error:
        raise DataError(f"{label}: {error}") from error


def _certain(desirable: bool) -> float:
    """Return a score that is above or below any threshold."""
    return math.inf if desirable else -math.inf


def _prompt(example: Mapping[str, Any], label: str) -> tuple[list[Any], Any]:
    """Return the messages of an example without those of its answers, and its tools."""
    source = example.get("input", example)
    if not isinstance(source, Mapping):
        raise DataError(f'{label}: input must be {{"messages": […]}}, not {source!r:.200}')
    messages = source.get("messages", source.get("prompt"))
    if not isinstance(messages, list):
        raise DataError(f"{label} needs messages, a list of chat messages, not {messages!r:.200}")
    return with_images(messages, source, label), source.get("tools")


def _answer(example: Mapping[str, Any], name: str, label: str) -> Any:
    """Return the message of an answer, which may be the only one of a list."""
    answer = example.get(name)
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if not isinstance(answer, Mapping):
        raise DataError(
            f"{label}: {name} must be one message of the assistant, not {answer!r:.200}"
        )
    return answer


def _score(example: Mapping[str, Any], label: str) -> float:
    """Return the score of a verdict: its `reward`, or its `label` as an infinite number."""
    verdict, reward = example.get("label"), example.get("reward")
    if isinstance(verdict, bool):
        return _certain(verdict)
    if verdict is None and is_number(reward) and math.isfinite(reward):
        return float(reward)
    raise DataError(
        f'{label} needs "label": true or false, or "reward": a number, or the answers "chosen" and '
        f'"rejected"; it has label={verdict!r:.100} and reward={reward!r:.100}'
    )


def highest_score(rated: Rated) -> float:
    """Return the highest score that is a number and no label; -inf if there is none."""
    scores = (score for _, score in rated.answers if math.isfinite(score))
    return max(scores, default=-math.inf)


def verdicts_of(rated: Rated, threshold: float) -> list[Verdict]:
    """Return the examples of KTO: each answer is desirable if its score is at least `threshold`.

    The answers of pairs are verdicts too: the better one is desirable, the worse one is not.
    """
    verdicts = [
        Verdict(
            prompt_ids=demo.prompt_ids,
            response_ids=demo.response_ids,
            desirable=score >= threshold,
            images=demo.images,
        )
        for demo, score in rated.answers
    ]
    for pair in rated.pairs:
        for ids, desirable in ((pair.chosen_ids, True), (pair.rejected_ids, False)):
            verdicts.append(
                Verdict(
                    prompt_ids=pair.prompt_ids,
                    response_ids=ids,
                    desirable=desirable,
                    images=pair.images,
                )
            )
    return verdicts


def pairs_of(rated: Rated) -> list[Pair]:
    """Return the examples of DPO: the pairs that were given, and pairs of rated answers.

    Of the answers to one prompt, the best and the worst make a pair, then the second best and the
    second worst, and so on, while their scores differ by more than rounding. The score of an answer
    that was rated several times is the mean. Answers without a partner are counted in
    `rated.left_out`.
    """
    scores: dict[tuple[int, ...], dict[tuple[int, ...], list[float]]] = defaultdict(dict)
    demos: dict[tuple[tuple[int, ...], tuple[int, ...]], Demonstration] = {}
    for demo, score in rated.answers:
        prompt, answer = prompt_identity(demo), tuple(demo.response_ids)
        demos[prompt, answer] = demo
        scores[prompt].setdefault(answer, []).append(score)
    pairs = list(rated.pairs)
    for prompt, answers in scores.items():
        means = {answer: _mean(values) for answer, values in answers.items()}
        ranked = sorted(means, key=lambda answer: (-means[answer], answer))
        paired = 0
        for best, worst in zip(ranked, reversed(ranked), strict=True):
            if is_equal(means[best], means[worst]) or means[best] < means[worst]:
                break
            pairs.append(_pair(demos[prompt, best], demos[prompt, worst]))
            paired += 2
        if paired < len(ranked):
            rated.left_out[UNPAIRED] += len(ranked) - paired
    return pairs


def is_equal(first: float, second: float) -> bool:
    """Return whether two scores are equal up to rounding, such as 0.1 + 0.2 and 0.3."""
    return math.isclose(first, second, rel_tol=ROUNDING, abs_tol=ROUNDING)


def _mean(values: Sequence[float]) -> float:
    """Return the mean of scores; certain verdicts that contradict each other count 1 and -1."""
    infinite = {value for value in values if math.isinf(value)}
    if len(infinite) == 1:
        return infinite.pop()
    return math.fsum(math.copysign(1, v) if math.isinf(v) else v for v in values) / len(values)


def contradictions(verdicts: Sequence[Verdict]) -> int:
    """Return the number of answers that have both verdicts for the same prompt."""
    kinds: dict[tuple[tuple[int, ...], tuple[int, ...]], set[bool]] = defaultdict(set)
    for verdict in verdicts:
        key = prompt_identity(verdict), tuple(verdict.response_ids)
        kinds[key].add(verdict.desirable)
    return sum(len(values) > 1 for values in kinds.values())


def reversed_pairs(pairs: Sequence[Pair]) -> int:
    """Return the number of two answers to a prompt of which each is the better one of a pair.

    An answer that is better than one and worse than another is no contradiction.
    """
    pairs_of_ids = {
        (prompt_identity(pair), tuple(pair.chosen_ids), tuple(pair.rejected_ids)) for pair in pairs
    }
    return sum((p, worse, better) in pairs_of_ids for p, better, worse in pairs_of_ids) // 2


def split(prompts: Sequence[Sequence[int]], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of the examples to train on, and of those to hold out.

    Whole chats are held out, so that no prompt is on both sides, nor the later turns of its chat.
    A prompt is of the chat of another one with which it begins.

    Args:
        prompts: prompt of each example (`prompt_identity`).
        share: share of the chats to hold out, rounded down to whole chats.
        seed: seed of the choice.
    """
    firsts: dict[tuple[int, ...], tuple[int, ...]] = {}
    first: tuple[int, ...] | None = None
    for ids in sorted({tuple(prompt) for prompt in prompts}):
        if first is None or ids[: len(first)] != first:  # its continuations follow in this order
            first = ids
        firsts[ids] = first
    distinct = sorted(set(firsts.values()))
    random.Random(seed).shuffle(distinct)
    test_chats = set(distinct[: int(share * len(distinct))])
    train: list[int] = []
    test: list[int] = []
    for index, prompt in enumerate(prompts):
        (test if firsts[tuple(prompt)] in test_chats else train).append(index)
    return train, test


def mismatched(verdicts: Sequence[Verdict], context: int, seed: int) -> list[list[int] | None]:
    """Return for each verdict an answer to another prompt, for KTO's reference point.

    None if no answer fits into the model's context with the prompt. If all prompts are equal, the
    answer is that of another verdict.

    Args:
        verdicts: the verdicts.
        context: length of the model's context in tokens.
        seed: seed of the choice.
    """
    order = list(range(len(verdicts)))
    random.Random(seed).shuffle(order)
    place = {index: number for number, index in enumerate(order)}
    prompts = [prompt_identity(verdict) for verdict in verdicts]
    has_others = len(set(prompts)) > 1
    chosen: list[list[int] | None] = []
    for index, verdict in enumerate(verdicts):
        start = place[index] + 1
        others = (order[(start + n) % len(order)] for n in range(len(order) - 1))
        chosen.append(
            next(
                (
                    verdicts[other].response_ids
                    for other in others
                    if (not has_others or prompts[other] != prompts[index])
                    and len(verdict.prompt_ids) + len(verdicts[other].response_ids) <= context
                ),
                None,
            )
        )
    return chosen
