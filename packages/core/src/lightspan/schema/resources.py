"""Resources: the versioned things that an algorithm hands to apps."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from lightspan.errors import ConfigError
from lightspan.schema.llm import LLM
from lightspan.schema.routing import Routing


class PromptTemplate(msgspec.Struct, frozen=True, kw_only=True, tag="prompt"):
    """A prompt with `{named}` placeholders (Python's `str.format`)."""

    template: str

    def format(self, **values: Any) -> str:
        """Fill the placeholders.

        Raises:
            ConfigError: a placeholder has no value.
        """
        try:
            return self.template.format(**values)
        except (KeyError, IndexError) as error:
            raise ConfigError(f"the prompt template needs a value for {error}") from error


Resource = LLM | PromptTemplate | Routing
NamedResources = dict[str, Resource]

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(NamedResources)


def encode_resources(resources: NamedResources) -> bytes:
    """Canonical JSON."""
    return _encoder.encode(resources)


def decode_resources(data: bytes) -> NamedResources:
    """The inverse of `encode_resources`."""
    return _decoder.decode(data)


def resources_id(resources: NamedResources) -> str:
    """An id made from the content: equal resources are one version."""
    return "re-" + hashlib.sha256(encode_resources(resources)).hexdigest()[:32]


ROUTING: Final = "routing"
"""The name under which an algorithm publishes its routing table among the resources."""


def routing_of(resources: NamedResources) -> Routing:
    """The routing table among the resources; an empty one if there is none."""
    routing = resources.get(ROUTING)
    return routing if isinstance(routing, Routing) else Routing()
