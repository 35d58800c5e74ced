"""Check that student and teacher have the same tokens, because ids are passed between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightspan.errors import ConfigError

RECIPE: Final = (
    "Distill passes token ids, so both need one tokenizer: use a teacher of the student's family, "
    "or let the teacher answer and fine-tune the student on its answers "
    "(docs/guides/compress.md)"
)
_TEXTS: Final = (
    "The quick brown fox jumps over 13 lazy dogs; isn't it 3.14159 times   slower?\n\n\t- yes\n",
    'def f(x: int) -> dict[str, float]:\n    return {"a": x**2, "b": [0x1F, 1e-9]}  # naïve\n',
    "Größe, façade, Ελληνικά, Привет, שלום, مرحبا, हिन्दी, 日本語、中文。한국어 🙂🚀 \u2028",
)
_MAX_PIECES: Final = 2048
"""Maximum number of the vocabulary's tokens whose texts a server is asked to tokenise."""
_MAX_SHOWN: Final = 3
"""Maximum number of tokens in an error message."""


def check_vocabularies(student: Any, teacher: Any, names: tuple[str, str]) -> None:
    """Compare two tokenizers of transformers: token → id, and their special tokens.

    Args:
        student: the student's tokenizer.
        teacher: the teacher's tokenizer.
        names: names of the two models, for the error.

    Raises:
        ConfigError: they differ; the error names tokens that do.
    """
    own, other = student.get_vocab(), teacher.get_vocab()
    tokens = own.keys() | other.keys()
    differences = [token for token in tokens if own.get(token) != other.get(token)]
    specials = [set(_special(tokenizer).items()) for tokenizer in (student, teacher)]
    if not differences and specials[0] == specials[1]:
        return
    if differences:
        shown = sorted(differences, key=lambda t: min(own.get(t, 2**31), other.get(t, 2**31)))
        texts = (f"{t!r} ({_id(own, t)} and {_id(other, t)})" for t in shown[:_MAX_SHOWN])
        what = (
            f"{len(own):,} and {len(other):,} tokens, of which {len(differences):,} differ, such "
            f"as {', '.join(texts)}"
        )
    else:
        shown = sorted(str(each) for each in specials[0] ^ specials[1])
        what = f"other special tokens: {', '.join(shown[:_MAX_SHOWN])}"
    raise ConfigError(
        f"the student {names[0]} and the teacher {names[1]} have different tokenizers: {what}. "
        f"{RECIPE}"
    )


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return str(vocabulary.get(token, "none"))


def _special(tokenizer: Any) -> dict[str, int]:
    tokens = [str(token) for token in tokenizer.all_special_tokens]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    return dict(zip(tokens, ids, strict=True))


def probe_texts(tokenizer: Any) -> list[str]:
    """Return texts whose ids show whether another tokenizer is the same.

    They have several scripts, numbers and code, the special tokens, and the texts of tokens spread
    over the whole vocabulary.
    """
    size = len(tokenizer)
    ids = range(0, size, -(-size // _MAX_PIECES))
    pieces = [tokenizer.decode([each]) for each in ids if each not in tokenizer.all_special_ids]
    whole = "\n".join(piece for piece in pieces if "\ufffd" not in piece)
    return [*_TEXTS, " x ".join(map(str, tokenizer.all_special_tokens)), whole]


def check_ids(tokenizer: Any, text: str, ids: list[int], server: str) -> None:
    """Compare the ids that a server gave to a text with those of the student's tokenizer.

    Raises:
        ConfigError: they differ; the error names the first difference.
    """
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    if own == ids:
        return
    place = next(
        (i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b),
        min(len(own), len(ids)),
    )
    piece = tokenizer.decode(own[place : place + 3])
    raise ConfigError(
        f"the student and the teacher {server} have different tokenizers: {piece!r} is "
        f"{own[place : place + 3]} for the student and {ids[place : place + 3]} for the teacher. "
        f"{RECIPE}"
    )
