"""Tests of resources, policy versions, and announcements of trainers and runners."""

from __future__ import annotations

import asyncio

import pytest

from lightspan.errors import NotFoundError
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import LearnedPrompt, PromptPlace, PromptTemplate
from lightspan.schema.records import PeerRole
from lightspan.schema.resources import INSTRUCTIONS, NamedResources
from lightspan.schema.system_prompts import Instructions
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import UNICODE, Clock, StoreTests, make_peer


class ResourceTests(StoreTests):
    """Test that resources are found by id, and that a policy's versions are all different."""

    async def test_resources(self, store: Store) -> None:
        resources: NamedResources = {
            "main_llm": LLM(
                base_url="http://127.0.0.1:1/v1", model=UNICODE, sampling={"temperature": 0.5}
            ),
            "prompt": PromptTemplate(template="{question} " + UNICODE),
            INSTRUCTIONS: Instructions(
                surveyed=["*"],
                prompts={
                    "a": LearnedPrompt(
                        before=PromptTemplate("{part_1} " + UNICODE),
                        after=PromptTemplate("{part_1}"),
                        place=PromptPlace.AGENT,
                        agent="a/b",
                    )
                },
                left_out={"c": UNICODE},
            ),
        }
        name = await store.put_resources(resources)
        assert await store.put_resources(dict(reversed(resources.items()))) == name
        other = await store.put_resources({"prompt": PromptTemplate(template="")})
        assert other != name
        assert await store.get_resources(name) == resources
        assert await store.get_resources(await store.put_resources({})) == {}
        with pytest.raises(NotFoundError, match="re-nobody"):
            await store.get_resources("re-nobody")

    async def test_versions_grow_and_are_never_reused(self, store: Store) -> None:
        assert await store.policy_versions("sql") == []
        allotted = await asyncio.gather(*(store.allot_version("sql") for _ in range(20)))
        assert sorted(allotted) == list(range(1, 21))
        assert await store.allot_version("other", "run", 3) == 1
        assert await store.allot_version("sql", "run", 7) == 21
        [only] = await store.policy_versions("other")
        assert (only.policy, only.version, only.run_id, only.step) == ("other", 1, "run", 3)
        assert [one.version for one in await store.policy_versions("sql")] == list(range(1, 22))

    async def test_versions_of_two_stores(self, stores: list[Store]) -> None:
        asked = [store.allot_version("sql") for _ in range(20) for store in stores]
        assert sorted(await asyncio.gather(*asked)) == list(range(1, 41))

    # --- peers ----------------------------------------------------------------------------
    async def test_peers(self, store: Store, clock: Clock) -> None:
        """The store returns the latest announcement of each trainer and runner (peer).

        It also returns the age of the announcement by the store's clock. After a day, an
        announcement is deleted.
        """
        assert await store.peers() == []
        await store.announce(make_peer("runner-2"))
        clock.advance(3)
        await store.announce(make_peer("run-1", role=PeerRole.TRAINER, run_id="run-1"))
        await store.announce(make_peer("runner-2", app=UNICODE, slots=8, silent_s=77.0))
        clock.advance(2)
        await store.announce(make_peer("run-1", role=PeerRole.TRAINER, complete=True))
        trainer = make_peer("run-1", role=PeerRole.TRAINER, complete=True)
        runner = make_peer("runner-2", app=UNICODE, slots=8, silent_s=2.0)
        assert await store.peers() == [trainer, runner]
        await store.withdraw("run-1")
        await store.withdraw("run-1")
        assert await store.peers() == [runner]
        clock.advance(86_400)
        assert await store.peers() == []

    async def test_peers_of_two_stores(self, stores: list[Store]) -> None:
        one, other = stores
        await one.announce(make_peer("runner-1"))
        assert await other.peers() == [make_peer("runner-1")]
