"""Show sampled tokens as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightspan.schema.token_records import TokenRecord
from lightspan_ui import views

MAX_TOKENS: Final = 4_000
"""Maximum number of tokens of a call in an answer."""
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A tokenizer that turns ids into texts.

    Args:
        path: path of its `tokenizer.json`.

    Raises:
        ModuleNotFoundError: the package `tokenizers` is not installed.
        Exception: the file is damaged; the package raises no narrower error.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens too; at most `views.MAX_TEXT` characters."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text[: views.MAX_TEXT]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds.

        Several tokens may encode one character. The last of them has it, and the others are empty.
        """
        pieces = []
        start = end = 0
        """The ids before `end` are shown. Those from `start` on are decoded again before new ones,
        because the text of a token may depend on the token before."""
        for place in range(1, len(ids) + 1):
            before, after = self.text(ids[start:end]), self.text(ids[start:place])
            if after.endswith(_REPLACEMENT) and place < len(ids) and place - end < 8:
                pieces.append("")
                continue
            pieces.append(after[len(before) :])
            start, end = end, place
        return pieces


def token_views(
    record: TokenRecord, tokenizer: Tokenizer | None
) -> tuple[list[views.TokenView], int]:
    """Return the sampled tokens of a record, and the number of those that are left out."""
    ids = record.response_ids
    shown = ids[:MAX_TOKENS]
    texts = [""] * len(shown) if tokenizer is None else tokenizer.pieces(shown)
    versions = [version for version, count in record.versions for _ in range(count)]
    versions += [0] * (len(ids) - len(versions))
    tokens = [
        views.TokenView(id=each, text=text, logprob=logprob, version=version)
        for each, text, logprob, version in zip(
            shown, texts, record.logprobs, versions, strict=False
        )
    ]
    return tokens, len(ids) - len(shown)
