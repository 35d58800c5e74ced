"""Resources: the prompts, endpoints and routing rules that an algorithm gives to apps."""

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
"""The resources that an algorithm gives to apps, by name."""

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(NamedResources)


def encode_resources(resources: NamedResources) -> bytes:
    """Encode resources as canonical JSON: equal bytes for equal resources."""
    return _encoder.encode(resources)


def decode_resources(data: bytes) -> NamedResources:
    """Decode resources from `encode_resources`."""
    return _decoder.decode(data)


def resources_id(resources: NamedResources) -> str:
    """Return the id of resources, a hash of their content."""
    return "re-" + hashlib.sha256(encode_resources(resources)).hexdigest()[:32]


ROUTING: Final = "routing"
"""Name of the routing table among the resources. The routing table maps the models of requests to
endpoints."""


def routing_of(resources: NamedResources) -> Routing:
    """Return the routing table among the resources; an empty one if there is none."""
    routing = resources.get(ROUTING)
    return routing if isinstance(routing, Routing) else Routing()


INSTRUCTIONS: Final = "instructions of agents"
"""Name of the agents' instructions among the resources. It is not an identifier, so that no
argument of an app has the same name."""


def instructions_in(resources: NamedResources) -> Instructions | None:
    """Return the agents' instructions among the resources; None if there are none."""
    instructions = resources.get(INSTRUCTIONS)
    return instructions if isinstance(instructions, Instructions) else None
