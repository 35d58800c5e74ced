"""The page of a store that another machine serves, with a key that only reads."""

from __future__ import annotations

from pathlib import Path

import pytest

import lightspan_ui.views as v
from lightspan.stores import open_store
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_gateway.store_server.server import StoreServer
from lightspan_ui.server import PREFIX
from packages.ui.tests.recorded import make_production_store, record
from packages.ui.tests.ui_client import serving

READER = "a-readers-key-0123456789"


@pytest.mark.parametrize(
    ("variable", "query"),
    [("LIGHTSPAN_STORE_KEY", ""), ("READER_KEY", "?api_key_env=READER_KEY")],
)
async def test_a_served_store_needs_a_readers_key_only(
    variable: str, query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, READER)
    url = await make_production_store(tmp_path / "app.db")
    store = open_store(url)
    keys = Keys({Role.READER: READER})
    async with store, StoreServer(store, keys, port=0) as server:  # noqa: SIM117
        async with serving(f"{server.url}{query}", write=True) as client:
            [summary] = (await client.get("/places", v.Places)).stores
            assert summary.rollouts == {"succeeded": 3}
            place = f"/stores/{summary.name}"
            page = await client.get(f"{place}/rollouts", v.RolloutPage, agent="writer")
            assert page.total == 3
            await record(store, "ro-new", answer="by cheque")
            page = await client.get(f"{place}/rollouts", v.RolloutPage, text="cheque")
            assert [row.rollout_id for row in page.rows] == ["ro-new"]
            rollout = await client.get(f"{place}/rollouts/ro-new", v.RolloutDetail)
            assert [call.fate for call in rollout.calls] == ["recorded", "recorded"]
            body = {"id": "at-ro-new", "reward": 1.0}
            refused = await client.send(f"{PREFIX}{place}/feedback", method="POST", body=body)
            assert refused.status == 503
            assert READER not in refused.error
