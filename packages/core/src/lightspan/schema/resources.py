"""Resources: the versioned things that an algorithm hands to apps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.routing import Routing
from lightspan.schema.system_prompts import Instructions

Resource = LLM | PromptTemplate | Routing | Instructions
NamedResources = dict[str, Resource]
Resources = Mapping[str, LLM | PromptTemplate | Instructions]
"""What an algorithm hands to apps, by name."""

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


INSTRUCTIONS: Final = "instructions of agents"
"""The name of what agents are told among the resources; no argument of an app can be called so."""


def instructions_in(resources: NamedResources) -> Instructions | None:
    """What agents are told; None: what the app says."""
    instructions = resources.get(INSTRUCTIONS)
    return instructions if isinstance(instructions, Instructions) else None
