"""The web page of a PostgreSQL store."""

from __future__ import annotations

import lightspan_ui.views as v
from lightspan.stores import open_store
from lightspan_ui.server import PREFIX
from packages.ui.tests.recorded import record
from packages.ui.tests.ui_client import serving
from tests.postgres.cluster import PASSWORD


async def test_a_store_is_shown_searched_and_rated(url: str) -> None:
    async with open_store(url) as store:
        for number in range(3):
            await record(store, f"ro-{number}", answer=f"answer {number}")
    async with serving(url, write=True) as client:
        [summary] = (await client.get("/places", v.Places)).stores
        assert summary.error == ""
        assert summary.rollouts == {"succeeded": 3}
        place = f"/stores/{summary.name}"
        page = await client.get(f"{place}/rollouts", v.RolloutPage, text="answer 1")
        assert [row.rollout_id for row in page.rows] == ["ro-1"]
        page = await client.get(f"{place}/rollouts", v.RolloutPage, agent="writer", user="ada")
        assert [row.rollout_id for row in page.rows] == ["ro-2", "ro-1", "ro-0"]
        facets = await client.get(f"{place}/facets", v.Facets)
        assert {each.name: each.n for each in facets.agent} == {"router": 3, "router/writer": 3}
        body = {"id": "at-ro-2", "reward": 0.5, "comment": "fair"}
        rated = await client.send(f"{PREFIX}{place}/feedback", method="POST", body=body)
        assert rated.status == 200
        page = await client.get(f"{place}/rollouts", v.RolloutPage, rated="yes")
        assert [(row.rollout_id, row.reward) for row in page.rows] == [("ro-2", 0.5)]
        rollout = await client.get(f"{place}/rollouts/ro-2", v.RolloutDetail)
        assert rollout.ratings[0].comment == "fair"
        for path in ("/places", f"{place}/rollouts", f"{place}/export"):
            assert PASSWORD.encode() not in (await client.send(PREFIX + path)).body
