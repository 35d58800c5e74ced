"""Images where an engine or a learner takes none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lightspan import LightningRL
from lightspan.errors import UnsupportedError
from lightspan.protocols.engine import GenerationRequest
from lightspan.schema.images import Image, PromptImage
from lightspan.schema.token_records import Sampling
from lightspan.training.backends import check_parts
from lightspan_testing.tiny_vision import picture
from lightspan_torch import Distill, RejectionSampling
from lightspan_torch.engine.request_checks import check_request
from lightspan_torch.engine.transformers import CAPABILITIES as ENGINE
from lightspan_torch.learner.torch import CAPABILITIES as LEARNER


def test_an_engine_without_sight_refuses_images() -> None:
    """The check that the vLLM engine uses too."""
    data = picture()
    digest = Image.of(data, "image/png").digest
    image = PromptImage(digest=digest, grid=(4, 6), start=0, length=6, data=data)
    request = GenerationRequest(
        request_id="r1", policy="p", prompt_ids=[7] * 6, sampling=Sampling(), images=(image,)
    )
    with pytest.raises(UnsupportedError, match="r1 has images, and policy p takes none: this eng"):
        check_request(request, context=100, vocabulary=10, options="")
    assert check_request(request, context=100, vocabulary=10, options="", no_images="") == 94


@pytest.mark.parametrize("algorithm", [LightningRL, RejectionSampling, Distill])
def test_a_learner_without_images_is_refused_before_a_rollout(algorithm: Any) -> None:
    """The engine takes images, so that the learner may get rows with images."""
    more = {"teacher": "teacher"} if algorithm is Distill else {}
    checked = algorithm("model", learning_rate=1e-5, **more)

    def check(*, engine: bool, learner: bool) -> None:
        capabilities = msgspec.structs.replace(ENGINE, images=("base", "policy") if engine else ())
        trains = msgspec.structs.replace(LEARNER, images=learner)
        policies = {"policy": 1, "base": 1}
        check_parts(
            checked,
            SimpleNamespace(capabilities=capabilities, policies=lambda: policies),  # type: ignore[arg-type]
            SimpleNamespace(capabilities=trains, policies=lambda: ["policy"]),  # type: ignore[arg-type]
        )

    with pytest.raises(UnsupportedError, match="takes images for policy, which the learner cannot"):
        check(engine=True, learner=False)
    check(engine=True, learner=True)
    check(engine=False, learner=False)
