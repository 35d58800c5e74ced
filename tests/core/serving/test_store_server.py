"""A store's server: who is let in, what each may do, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.core.serving.asking import Answer, ask, packed
from tests.core.stores.served import ADMIN, KEYS, RUNNER, TRAINER, Served, serving

from lightspan import __version__
from lightspan.errors import ConfigError, StoreError
from lightspan.runners.deaths import Death, bury
from lightspan.schema.conventions import HEADER_PROTOCOL, PROTOCOL_VERSION
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Claim,
    Outcome,
    PeerRole,
    RolloutState,
    RolloutStatus,
    new_id,
)
from lightspan.schema.reward import Reward
from lightspan.schema.texts import without_keys
from lightspan.serving.store.keys import Keys, take_keys
from lightspan.serving.store.server import StoreServer
from lightspan.stores import open_store
from lightspan.stores.memory import MemoryStore
from lightspan.stores.protocol import Store
from lightspan.stores.remote.operations import OPERATIONS
from lightspan.stores.remote.proofs import ClaimIds
from lightspan.stores.remote.roles import Role
from lightspan.stores.sqlite import SQLiteStore
from lightspan.testing.store_suite import (
    LEASE_S,
    make_call,
    make_peer,
    make_production,
    make_report,
    make_rollout,
    make_span,
    ref,
)

OLD_TRAINER = "a-trainer-key-of-before-01"
REQUEST = new_id("request")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    keys = Keys({**KEYS, Role.TRAINER: [OLD_TRAINER, TRAINER]})
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), keys) as served:
        yield served


@pytest.fixture
def open_as(served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store, opened with a key in a variable of its own."""

    def made(key: str) -> Store:
        name = f"KEY_{len(key)}_{key[-4:].upper()}".replace("-", "_")
        monkeypatch.setenv(name, key)
        return open_store(f"{served.url}?api_key_env={name}")

    return made


# --- who ------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", ["", "wrong", TRAINER[:-1], TRAINER + " x", "ü", ADMIN.upper()])
async def test_who_has_no_key_learns_nothing(served: Served, key: str) -> None:
    for path, body in {
        "/store/v1": None,
        "/store/v1/count": b"",
        "/store/v1/nonsense": b"",
        "/else": None,
    }.items():
        answer = await asyncio.to_thread(ask, served.url, path, body, key.encode().decode("latin1"))
        assert answer.status == 401
        assert answer.message == (
            "the key that was sent opens nothing here, or none was sent: LIGHTSPAN_STORE_KEY holds "
            "a client's, or the variable that ?api_key_env= names"
        )


async def test_a_wrong_key_is_named_and_not_shown(
    open_as: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "a-key-of-nobody-0123456789"
    store = open_as(wrong)
    with pytest.raises(StoreError, match=r"the key in \$KEY_26_6789") as caught:
        await store.open()
    assert wrong not in f"{caught.value} {store!r} {store.url} {caplog.text}"


async def test_no_key(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTSPAN_STORE_KEY", raising=False)
    with pytest.raises(StoreError, match="sent: no key"):
        await open_store(served.url).open()


@pytest.mark.parametrize("key", [OLD_TRAINER, TRAINER, ADMIN])
async def test_every_key_of_a_role_opens(open_as: Any, key: str) -> None:
    async with open_as(key) as store:
        assert await store.count() == {}


async def test_a_key_that_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who works with it is told when the server has it no more, and nothing is asked twice."""
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", OLD_TRAINER)
    both, new = (Keys({Role.TRAINER: keys}) for keys in ([OLD_TRAINER, TRAINER], [TRAINER]))
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), both) as served:
        async with open_store(served.url) as store:
            await store.enqueue([make_rollout()])
            port = await asyncio.to_thread(served.stop)
            served._keys = new
            await asyncio.to_thread(served.start, port)
            with pytest.raises(StoreError, match="opens nothing here"):
                await store.count()


def test_keys_are_taken_out_of_the_environment() -> None:
    environment = {"T1": TRAINER, "T2": OLD_TRAINER, "R": RUNNER, "LANG": "C"}
    keys = take_keys({Role.TRAINER: ["T1", "T2", "T1"], Role.RUNNER: ["R"]}, environment)
    assert environment == {"LANG": "C"}
    opened = [keys.role_of(key) for key in (TRAINER, OLD_TRAINER, RUNNER, ADMIN, "")]
    assert opened == [Role.TRAINER, Role.TRAINER, Role.RUNNER, None, None]
    assert TRAINER not in without_keys(f"an error says {TRAINER}")
    assert not any(key in repr(vars(keys)) for key in (TRAINER, OLD_TRAINER, RUNNER))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({}, "--without-key"),
        ({Role.TRAINER: []}, "--trainer-key-env"),
        ({Role.TRAINER: ["GONE"]}, "--trainer-key-env GONE: that variable is not set"),
        ({Role.ADMIN: ["EMPTY"]}, "--admin-key-env EMPTY: that variable is not set"),
        ({Role.ADMIN: ["SHORT"]}, "a key of 15 characters can be guessed"),
        ({Role.ADMIN: ["LINES"]}, "$LINES is no key"),
        ({Role.TRAINER: ["T"], Role.RUNNER: ["SAME"]}, "SAME holds the same key as T"),
        (
            {Role.TRAINER: ["T"], Role.RUNNER: ["T"]},
            "--runner-key-env T: --trainer-key-env names that variable too",
        ),
    ],
)
def test_keys_that_are_none(names: dict[Role, list[str]], said: str) -> None:
    secrets = {"SHORT": "x" * 15, "LINES": f"{TRAINER}\n{TRAINER}", "T": TRAINER, "SAME": TRAINER}
    environment = {"EMPTY": "", **secrets}
    with pytest.raises(ConfigError) as caught:
        take_keys(names, environment)
    assert said in str(caught.value)
    assert not any(key in str(caught.value) for key in secrets.values())
    assert not set(environment) & {name for some in names.values() for name in some}


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Host": "["}]
)
async def test_without_keys_no_web_page_comes_in(tmp_path: Path, headers: dict[str, str]) -> None:
    with serving(lambda: SQLiteStore(tmp_path / "store.db")) as served:
        for path, body in {"/store/v1": None, "/store/v1/count": packed()}.items():
            answer = await asyncio.to_thread(ask, served.url, path, body, **headers)
            assert answer.status in (400, 403)
        assert (await asyncio.to_thread(ask, served.url, "/store/v1")).status == 200


# --- what each may --------------------------------------------------------------------------
def test_what_a_runner_may_do() -> None:
    """No more than `runners` does."""
    runners = {name for name, each in OPERATIONS.items() if Role.RUNNER in each.roles}
    assert runners == {
        *("claim", "await_work", "heartbeat", "report", "finish", "add_spans", "get_resources"),
        *("announce", "withdraw", "peers", "rollouts", "attempts"),
    }
    assert all(Role.ADMIN in each.roles for each in OPERATIONS.values())
    beyond = [name for name, each in OPERATIONS.items() if Role.TRAINER not in each.roles]
    assert beyond == ["prune"]


async def test_every_other_operation_is_refused_to_a_runner(open_as: Any) -> None:
    async with open_as(TRAINER) as trainer:
        await trainer.enqueue([make_rollout()])
        before = await trainer.watch()
    async with open_as(RUNNER) as store:
        production = make_production("ro-9")
        span = make_call(production.attempt)
        refusals = [
            *(store.put_resources({}), store.allot_version("sql"), store.policy_versions("sql")),
            *(store.enqueue([make_rollout("ro-2")]), store.start([production]), store.expire()),
            store.lease_time(),
            *(store.cancel(["ro-1"]), store.watch(), store.count(), store.attempt("at-1")),
            *(store.claim_of_token("token"), store.mark_damaged("at-1", "x")),
            *(store.add_calls([span]), store.mark_call("at-1", "call-1", "ok")),
            *(store.spans(["at-1"]), store.token_records(["at-1"]), store.prune(0.0)),
        ]
        for refusal in refusals:
            with pytest.raises(StoreError, match="the key is a runner's, who may not ask for"):
                await refusal
    assert len(refusals) == len(OPERATIONS) - 12
    async with open_as(TRAINER) as trainer:
        assert await trainer.watch() == before


async def test_who_may_have_the_store_forget(open_as: Any) -> None:
    async with open_as(TRAINER) as trainer, open_as(ADMIN) as admin:
        await trainer.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        await trainer.cancel(["ro-1", "ro-2"])
        with pytest.raises(StoreError, match=r"a trainer's, who may not ask for prune: only admin"):
            await trainer.prune(0.0)
        assert await admin.prune(0.0) == 1


async def test_what_a_runner_does(open_as: Any) -> None:
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as store:
        resources_id = await trainer.put_resources({})
        await trainer.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        assert await store.get_resources(resources_id) == {}
        await store.announce(make_peer("runner-1"))
        [claim] = await store.claim("runner-1", 1, LEASE_S)
        attempt = claim.attempt
        assert await store.heartbeat([ref(attempt)], LEASE_S) == []
        assert await store.add_spans(ref(attempt), [make_span(attempt)]) == 0
        assert await store.report([make_report(attempt)]) == [True]
        await store.withdraw("runner-1")
        assert await trainer.peers() == []


async def test_little_that_asks_for_much_is_refused_to_a_runner(open_as: Any) -> None:
    """A short request may not have the server look up, send or write a hundred times as much."""
    many = [f"ro-{number}" for number in range(10_001)]
    peer = make_peer("n" * 1_001)
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as store:
        await trainer.enqueue([make_rollout("ro-1")])
        [claim] = await store.claim("n" * 1_000, 1, LEASE_S)
        refs = [ref(claim.attempt)]
        report = make_report(claim.attempt, AttemptStatus.LOST, message="x" * 2**20)
        for asked, said in (
            (store.attempts(many), "attempts: rollout_ids has 10,001 items.* may name 10,000"),
            (store.attempts(["ro-1", "ro-1"]), "attempts: rollout_ids names a rollout twice"),
            (store.await_work(["r"] * 1_001), "await_work: run_ids has 1,001 items"),
            (store.heartbeat(refs * 10_001, LEASE_S), "heartbeat: attempts has 10,001 items"),
            (store.claim("n" * 1_001, 1, LEASE_S), "claim: a runner's name has at most 1,000"),
            (store.claim("ü" * 501, 1, LEASE_S), "at most 1,000 bytes, not 1,002"),
            (store.announce(peer), "announce: a runner's name .* not 1,001"),
            (store.announce(make_peer("p", app="a" * 2**14)), "of itself at most 16,384 bytes"),
            (store.report([report]), "report: a report has at most 1,048,576 bytes, not 1,048,"),
            (store.finish(report, []), "finish: a report has at most 1,048,576 bytes, not 1,048,"),
        ):
            with pytest.raises(StoreError, match=said):
                await asked
        with pytest.raises(StoreError, match="await_work: a runner may send 1,000,000 values at"):
            await store.await_work(["r"] * 1_000_001)
        assert len(await store.attempts(many[:10_000])) == 1
        assert len(await trainer.attempts(many)) == 1  # a trainer may


async def test_runners_may_not_announce_without_end(
    open_as: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that comes has all of them looked through."""
    monkeypatch.setattr("lightspan.serving.store.limits._MOST_PEERS", 2)
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as store:
        for name in ("one", "two", "one"):
            await store.announce(make_peer(name))
        with monkeypatch.context() as hurried:
            hurried.setattr("lightspan.stores.remote.connection._sleep", _at_once)
            with pytest.raises(StoreError, match="2 processes were here within a day"):
                await store.announce(make_peer("three"))
        await trainer.announce(make_peer("three"))  # a trainer may


async def _at_once(seconds: float) -> None:
    """In place of a pause."""


async def test_a_runner_sees_the_tokens_of_its_own_claims_only(open_as: Any) -> None:
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as one, open_as(RUNNER) as other:
        await trainer.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        [mine] = await one.claim("runner-1", 1, LEASE_S)
        [theirs] = await other.claim("runner-2", 1, LEASE_S)
        assert mine.attempt.call_token
        assert theirs.attempt.call_token not in ("", mine.attempt.call_token)
        seen = await other.attempts(["ro-1", "ro-2"])
        assert [attempt.rollout_id for attempt in seen] == ["ro-1", "ro-2"]
        assert [attempt.call_token for attempt in seen] == ["", ""]
        everything = await trainer.attempts(["ro-1", "ro-2"])
        tokens = {attempt.call_token for attempt in everything}
        assert tokens == {mine.attempt.call_token, theirs.attempt.call_token}


async def test_a_runner_sees_what_is_under_way_only(open_as: Any) -> None:
    """No production, which nobody asked for, and nothing of attempts that are over."""
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as store:
        await trainer.start([make_production("ro-served")])
        await trainer.enqueue([make_rollout("ro-1"), make_rollout("ro-2"), make_rollout("ro-3")])
        first, second = (claim.attempt for claim in await store.claim("runner-1", 2, LEASE_S))
        await store.report([make_report(first)])
        states = await store.rollouts(status=[RolloutStatus.RUNNING])
        assert [state.rollout.rollout_id for state in states] == ["ro-2"]
        assert len(await trainer.rollouts(status=[RolloutStatus.RUNNING])) == 2
        seen = await store.attempts(["ro-1", "ro-2", "ro-3"])
        assert [attempt.attempt_id for attempt in seen] == [second.attempt_id]
        for status in (None, [], [RolloutStatus.SUCCEEDED], [*RolloutStatus]):
            with pytest.raises(StoreError, match="other rollouts than those that are running"):
                await store.rollouts(status=status)


async def test_a_runner_writes_to_its_own_claims_only(served: Served, open_as: Any) -> None:
    """Whatever it sees of the attempts of others: their ids are not those of their claims."""
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as victim:
        await trainer.enqueue([make_rollout(f"ro-{number}") for number in range(4)])
        theirs = [claim.attempt for claim in await victim.claim("victim", 3, LEASE_S)]
        answer = await _asked_as_runner(
            served, "claim", runner_id="attacker", slots=1, lease_s=LEASE_S, request_id=REQUEST
        )
        [mine] = msgspec.msgpack.decode(answer.body, type=list[Claim])
        [seen] = [
            attempt
            for attempt in await _running_as_runner(served)
            if attempt.attempt_id == theirs[0].attempt_id
        ]
        own = f"{REQUEST}/0"
        forged = ["", own, f"{seen.attempt_id}/0", f"{new_id('request')}/0", "request/0", "é/0"]
        paid = make_report(seen, reward=Reward(1.0))
        lost = seen.report(AttemptStatus.LOST, Outcome.INFRASTRUCTURE)
        spans = [make_span(seen)]
        for proofs in ([], *([proof] for proof in forged)):
            for name, does, told in [
                ("report", "end", {"reports": [paid]}),
                ("report", "end", {"reports": [lost]}),
                ("finish", "end", {"report": paid, "spans": []}),
                ("finish", "end", {"report": lost, "spans": spans}),
                ("heartbeat", "extend", {"attempts": [ref(seen)], "lease_s": 80_000.0}),
                ("heartbeat", "extend", {"attempts": [ref(seen)], "lease_s": 0.001}),
                ("add_spans", "record anything for", {"attempt": ref(seen), "spans": spans}),
            ]:
                answer = await _asked_as_runner(served, name, **told, proofs=proofs)
                assert answer.status == 403
                assert f"not {does} an attempt that it has not claimed" in answer.message
        now = await trainer.attempt(seen.attempt_id)
        assert now == theirs[0]  # its lease, too, is as long as it was
        assert await trainer.spans([seen.attempt_id]) == {seen.attempt_id: []}
        extended = {"attempts": [ref(mine.attempt), ref(seen)], "lease_s": LEASE_S}
        answer = await _asked_as_runner(served, "heartbeat", **extended, proofs=[own, own])
        assert answer.status == 403
        extended = {"attempts": [ref(mine.attempt)], "lease_s": LEASE_S}
        answer = await _asked_as_runner(served, "heartbeat", **extended, proofs=[own])
        assert (answer.status, msgspec.msgpack.decode(answer.body)) == (200, [])
        both = [make_report(mine.attempt, reward=Reward(0.5)), paid]
        answer = await _asked_as_runner(served, "report", reports=both, proofs=[own, own])
        assert answer.status == 403
        failed = msgspec.structs.replace(paid, status=AttemptStatus.FAILED)
        answer = await _asked_as_runner(served, "report", reports=[failed], proofs=[own])
        assert answer.status == 403
        answer = await _asked_as_runner(served, "report", reports=both[:1], proofs=[own])
        assert (answer.status, msgspec.msgpack.decode(answer.body)) == (200, [True])
        # its own, whoever asks in the process of the claim
        async with open_as(RUNNER) as guard:
            assert await guard.add_spans(ref(theirs[2]), [make_span(theirs[2])]) == 0
            assert await guard.heartbeat([ref(theirs[1]), ref(theirs[2])], LEASE_S) == []
            assert await guard.finish(make_report(theirs[2]), [make_span(theirs[2])])
        rewards = {a.attempt_id: a.reward for a in await trainer.attempts(["ro-0", "ro-3"])}
        assert rewards == {seen.attempt_id: None, mine.attempt.attempt_id: Reward(0.5)}


async def test_who_looks_after_a_runner_ends_what_it_had_claimed(
    served: Served, open_as: Any
) -> None:
    """It shows the claims of a process that is dead: by the secret that it had given that one."""
    death = Death(
        runner="dead",
        exit_code=-9,
        faults=Path(),
        alone="",
        claimed=3,
        is_single=False,
        silent_s=None,
        leaves="",
        claims_secret="a secret",
    )
    ids = ClaimIds("a secret")
    assert len({ids.new() for _ in range(1_000)}) == 1_000
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as store:
        await trainer.enqueue([make_rollout(f"ro-{number}") for number in range(3)])
        for slots in (1, 2):
            claim = {"runner_id": "dead", "slots": slots, "lease_s": LEASE_S}
            answer = await _asked_as_runner(served, "claim", **claim, request_id=ids.new())
            assert answer.status == 200
        with pytest.raises(StoreError, match="not end an attempt that it has not claimed"):
            await bury(dataclasses.replace(death, claims_secret=""), store, None)
        assert await bury(dataclasses.replace(death, claims_secret="another"), store, None) == []
        assert await trainer.count() == {RolloutStatus.RUNNING: 3}
        # another may claim under its name, and keeps what it has
        await trainer.enqueue([make_rollout("ro-of-another")])
        theirs = {"runner_id": "dead", "slots": 1, "lease_s": LEASE_S}
        assert (await _asked_as_runner(served, "claim", **theirs)).status == 200
        assert len(await bury(death, store, None)) == 3
        assert await trainer.count() == {RolloutStatus.QUEUED: 3, RolloutStatus.RUNNING: 1}
    assert "a secret" not in repr(death)


async def _asked_as_runner(served: Served, name: str, **arguments: Any) -> Answer:
    """As a program asks that is not lightspan's."""
    body = packed(**arguments)
    return await asyncio.to_thread(ask, served.url, f"/store/v1/{name}", body, RUNNER)


async def _running_as_runner(served: Served) -> list[Attempt]:
    answer = await _asked_as_runner(served, "rollouts", status=["running"])
    states = msgspec.msgpack.decode(answer.body, type=list[RolloutState])
    names = [state.rollout.rollout_id for state in states]
    answer = await _asked_as_runner(served, "attempts", rollout_ids=names)
    return msgspec.msgpack.decode(answer.body, type=list[Attempt])


async def test_the_longest_lease_of_a_runner(served: Served) -> None:
    """Of the day that it may last: one that is gone keeps nobody from its rollouts for ever."""
    for lease_s, status in {86_400.0: 200, 86_401.0: 400, -1.0: 400}.items():
        for name, who in {
            "claim": {"runner_id": "r", "slots": 1},
            "heartbeat": {"attempts": []},
        }.items():
            body = packed(lease_s=lease_s, **who)
            answer = await asyncio.to_thread(ask, served.url, f"/store/v1/{name}", body, RUNNER)
            assert answer.status == status


async def test_a_runner_is_no_trainer(open_as: Any) -> None:
    trainers = make_peer("run-1", role=PeerRole.TRAINER, run_id="run-1")
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as store:
        await trainer.announce(trainers)
        with pytest.raises(StoreError, match="announce itself as another kind"):
            await store.announce(make_peer("run-2", role=PeerRole.TRAINER))
        with pytest.raises(StoreError, match="under the id of another kind of peer"):
            await store.announce(make_peer("run-1"))
        with pytest.raises(StoreError, match="withdraw another kind"):
            await store.withdraw("run-1")
        await store.withdraw("nobody")
        [kept] = await store.peers()
        assert (kept.peer_id, kept.role) == ("run-1", PeerRole.TRAINER)


# --- what cannot be asked -------------------------------------------------------------------
async def test_what_is_no_operation_is_refused_by_name(served: Served) -> None:
    for name in ("drop_everything", "close", "__aexit__", "capabilities", "open"):
        answer = await asyncio.to_thread(ask, served.url, f"/store/v1/{name}", packed())
        assert answer.status == 404
        assert f"a store has no operation {name!r}; it has put_resources, " in answer.message
    answer = await asyncio.to_thread(ask, served.url, "/v1/chat/completions", b"{}")
    assert (answer.status, "no such address" in answer.message) == (404, True)


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("count", b"\xc1", "the arguments of count cannot be read"),
        ("count", b"", "the arguments of count cannot be read"),
        ("count", b"{}", "the arguments of count cannot be read"),
        ("count", packed(run_id=7), "run_id"),
        ("count", packed(run="x"), "unknown field `run`"),
        ("heartbeat", packed(attempts=[]), "missing required field `lease_s`"),
        ("enqueue", packed(rollouts=[{"rollout_id": "ro-1"}]), "missing required field `task`"),
        ("claim", packed(runner_id="r", slots=1, lease_s=1.0, request_id="x"), "new_id"),
        ("count", b"\x91" * 100_000, "the arguments of count cannot be read"),
        ("count", b"\x81\xa6run_id\xa2\xff\xfe", "the arguments of count cannot be read"),
        ("watch", packed(cursor=9, timeout_s=math.nan), "timeout_s=nan must be a finite number"),
        ("claim", packed(runner_id="r", slots=1, lease_s=math.inf), "lease_s=inf must be a finite"),
        ("rollouts", packed(limit=2**63), "limit=9223372036854775808 is no integer"),
    ],
)
async def test_arguments_that_are_none(served: Served, name: str, body: bytes, said: str) -> None:
    answer = await asyncio.to_thread(ask, served.url, f"/store/v1/{name}", body)
    assert answer.status == 400
    assert said in answer.message


async def test_a_client_that_says_no_version(served: Served) -> None:
    headers = {HEADER_PROTOCOL.replace("-", "_"): "none"}
    answer = await asyncio.to_thread(ask, served.url, "/store/v1/count", packed(), **headers)
    assert answer.status == 409
    assert f"speaks protocol {PROTOCOL_VERSION}, the client's none" in answer.message


async def test_a_runner_of_another_version(
    served: Served, open_as: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both versions are named, and what to do, before anything is claimed."""
    monkeypatch.setattr("lightspan.stores.remote.connection.PROTOCOL_VERSION", 7)
    monkeypatch.setattr("lightspan.stores.remote.connection.__version__", "9.8.7")
    with pytest.raises(StoreError) as raised:
        await open_as(RUNNER).open()
    said = str(raised.value)
    assert f"the server's lightspan {__version__} speaks protocol {PROTOCOL_VERSION}" in said
    assert f"this one (9.8.7 of {sys.executable}) speaks 7" in said
    assert "install the same version of lightspan on both sides" in said


async def test_a_runner_hears_of_no_path_of_another_machine(open_as: Any) -> None:
    trainers = make_peer("run-1", role=PeerRole.TRAINER, run_id="run-1", python="of-ada/python")
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as store:
        await trainer.announce(trainers)
        assert [peer.python for peer in await store.peers()] == [""]
        assert [peer.python for peer in await trainer.peers()] == ["of-ada/python"]


async def test_a_body_that_says_no_size(tmp_path: Path) -> None:
    """What comes in chunks is counted too."""
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), max_body=1_000) as served:
        host, port = served.url.removeprefix("http://").split(":")
        head = (
            f"POST /store/v1/count HTTP/1.1\r\nHost: {host}\r\n{HEADER_PROTOCOL}: "
            f"{PROTOCOL_VERSION}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

        def send() -> bytes:
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head.encode() + b"7d0\r\n" + b"x" * 2_000 + b"\r\n0\r\n\r\n")
                return connection.recv(1_000)

        assert b" 413 " in (await asyncio.to_thread(send)).split(b"\r\n")[0]


def test_a_store_that_ends_with_the_process_is_not_served() -> None:
    with pytest.raises(ConfigError, match=r"memory:: .*serve a file"):
        StoreServer(MemoryStore(), Keys.of_this_machine())


# --- several at once ------------------------------------------------------------------------
async def test_what_is_asked_together_is_answered_each(served: Served, open_as: Any) -> None:
    """One that fails, cannot be read, may not be asked or goes by itself fails alone."""
    async with open_as(TRAINER) as store:
        await store.enqueue([make_rollout()])
    lease = {"runner_id": "runner", "slots": 1, "lease_s": LEASE_S}
    asked = [
        ("mark_damaged", packed(attempt_id="at-nobody", reason="x")),
        ("claim", packed(**lease)),
        ("claim", b"\xc1"),
        ("nonsense", packed()),
        ("count", packed()),
        ("heartbeat", packed(attempts=[], lease_s=1.0)),
    ]
    answer = await asyncio.to_thread(ask, served.url, "/store/v1", msgspec.msgpack.encode(asked))
    assert answer.status == 200
    answers = msgspec.msgpack.decode(answer.body)
    assert [status for status, _ in answers] == [409, 200, 400, 404, 400, 200]
    assert "at-nobody" in msgspec.msgpack.decode(answers[0][1])["message"]
    assert "asked by itself" in msgspec.msgpack.decode(answers[4][1])["message"]
    [claim] = msgspec.msgpack.decode(answers[1][1])
    assert claim["rollout"]["rollout_id"] == "ro-1"
    runners = await asyncio.to_thread(
        ask, served.url, "/store/v1", msgspec.msgpack.encode([asked[0], asked[5]]), RUNNER
    )
    assert [status for status, _ in msgspec.msgpack.decode(runners.body)] == [403, 200]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (msgspec.msgpack.encode("no list"), "cannot be read"),
        (msgspec.msgpack.encode([("claim", b"")] * 65), "64 at most"),
        (b"\x91\x92\xa2\xff\xfe\xc4\x00", "cannot be read"),
    ],
)
async def test_what_cannot_be_asked_together(served: Served, body: bytes, said: str) -> None:
    answer = await asyncio.to_thread(ask, served.url, "/store/v1", body)
    assert (answer.status, said in answer.message) == (400, True)


# --- what is counted ------------------------------------------------------------------------
async def test_metrics(served: Served, open_as: Any) -> None:
    """In Prometheus's words, by the operation and what came of it; a runner may not read them."""
    async with open_as(TRAINER) as store:
        await store.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        await store.claim("runner", 1, LEASE_S)
        with pytest.raises(StoreError):
            await store.attempt("at-nobody")
        for _ in range(2):
            await store.watch()
    await asyncio.to_thread(ask, served.url, "/store/v1/nonsense", b"")
    for key, status in {"": 401, RUNNER: 403}.items():
        assert (await asyncio.to_thread(ask, served.url, "/metrics", None, key)).status == status
    answer = await asyncio.to_thread(ask, served.url, "/metrics", None, ADMIN)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/plain; version=0.0.4")
    lines = answer.body.decode().splitlines()
    for line in (
        "# TYPE lightspan_store_requests_total counter",
        'lightspan_store_requests_total{operation="enqueue",status="200"} 1',
        'lightspan_store_requests_total{operation="attempt",status="409"} 1',
        'lightspan_store_requests_total{operation="watch",status="200"} 2',
        'lightspan_store_requests_total{operation="other",status="404"} 1',
        'lightspan_store_request_seconds_count{operation="watch"} 2',
        'lightspan_store_requests{kind="work"} 0',
        'lightspan_store_rollouts{status="queued"} 1',
        'lightspan_store_rollouts{status="running"} 1',
        'lightspan_store_rollouts{status="lost"} 0',
    ):
        assert line in lines
    watched = 'lightspan_store_request_seconds_sum{operation="watch"}'
    [seconds] = (line for line in lines if line.startswith(watched))
    assert float(seconds.rpartition(" ")[2]) > 0


# --- health ---------------------------------------------------------------------------------
async def test_health(served: Served) -> None:
    """Anybody may ask, and is told nothing else."""
    answer = await asyncio.to_thread(ask, served.url, "/health", None, "")
    assert (answer.status, json.loads(answer.body)) == (200, {"status": "ok"})
    await asyncio.to_thread(served.run, served.store.close())
    answer = await asyncio.to_thread(ask, served.url, "/health", None, "")
    assert (answer.status, json.loads(answer.body)) == (503, {"status": "failed"})


async def test_health_is_told_in_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks waits for some seconds, a store whose database is away for half a minute."""

    async def away(policy: str) -> list[Any]:
        await asyncio.sleep(600)
        return []

    monkeypatch.setattr("lightspan.serving.store.server._HEALTH_S", 0.01)
    monkeypatch.setattr(served.store, "policy_versions", away)
    answer = await asyncio.to_thread(ask, served.url, "/health", None, "")
    assert (answer.status, json.loads(answer.body)) == (503, {"status": "failed"})


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604])
def test_a_file_of_keys_that_others_can_read_is_told(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(RUNNER)
    file.chmod(mode)
    take_keys({}, {}, {Role.RUNNER: [str(file)]})
    told = f"--runner-key-file {file} can be read by other users of this machine: chmod 600 {file}"
    assert caplog.messages == ([] if mode == 0o600 else [told])
