"""Test the validation of users' arguments."""

from __future__ import annotations

from typing import Any

import pytest

from lightspan.errors import ConfigError
from lightspan.schema.validation import parse_gateway_address


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.5", ("10.0.0.5", 0)),
        ("trainer.example:8100", ("trainer.example", 8100)),
        ("[fd00::5]:8100", ("fd00::5", 8100)),
    ],
)
def test_where_a_gateway_is_to_listen(text: str, place: tuple[str, int]) -> None:
    assert parse_gateway_address(text) == place


@pytest.mark.parametrize(
    "text",
    ["", "http://10.0.0.5", "10.0.0.5/x", "me@10.0.0.5", "10.0.0.5:99999", "[x", ":80", "h:p", 7],
)
def test_what_is_no_place(text: Any) -> None:
    with pytest.raises(ConfigError, match=r'^gateway=.* is not an address: give "HOST"'):
        parse_gateway_address(text)


@pytest.mark.parametrize("text", ["0.0.0.0", "0.0.0.0:80", "[::]:80"])
def test_every_address_is_none_to_be_told(text: str) -> None:
    with pytest.raises(ConfigError, match=r"all addresses of this machine"):
        parse_gateway_address(text)
