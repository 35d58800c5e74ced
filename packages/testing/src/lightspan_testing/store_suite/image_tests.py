"""Tests of the images of calls."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from lightspan.errors import DataError, NotFoundError
from lightspan.schema.images import Image, PromptImage
from lightspan.schema.records import Attempt
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    IMAGE,
    Clock,
    StoreTests,
    claim_one,
    make_call,
    make_report,
    make_rollout,
    records_of,
    ref,
    start,
)

_OTHER = Image.of(bytes(range(256)) * 20, "image/jpeg")
_LARGE = Image.of(bytes(range(256)) * 2**14, "image/webp")
_ALL = [IMAGE.digest, _OTHER.digest, _LARGE.digest]
_DAY_S = 86_400.0


class ImageTests(StoreTests):
    """Test that each image is stored once, and deleted with the last attempt that has it."""

    async def test_images_are_read_by_digest(self, store: Store) -> None:
        attempt = await start(store)
        await store.add_images(ref(attempt), [IMAGE, _LARGE])
        await store.add_images(ref(attempt), [])
        assert await store.images(_ALL) == {IMAGE.digest: IMAGE, _LARGE.digest: _LARGE}
        assert await store.images([_LARGE.digest] * 2) == {_LARGE.digest: _LARGE}
        assert await store.images([]) == {}

    async def test_more_images_than_one_answer_has(self, store: Store) -> None:
        attempt = await start(store)
        images = [Image.of(bytes([number]) * 5000, "image/png") for number in range(200)]
        await store.add_images(ref(attempt), images)
        found = await store.images([image.digest for image in images])
        assert found == {image.digest: image for image in images}

    async def test_an_image_is_stored_once(self, store: Store) -> None:
        """The first type counts; repeating an image, in one call or several, changes nothing."""
        await store.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        first, second = await claim_one(store), await claim_one(store)
        await store.add_images(ref(first), [IMAGE, IMAGE])
        again = msgspec.structs.replace(IMAGE, media_type="image/gif")
        await store.add_images(ref(second), [again, _OTHER])
        assert await store.images(_ALL) == {IMAGE.digest: IMAGE, _OTHER.digest: _OTHER}

    async def test_many_attempts_at_once(self, stores: list[Store]) -> None:
        await stores[0].enqueue([make_rollout(f"ro-{n}") for n in range(20)])
        attempts = [await claim_one(stores[0]) for _ in range(20)]
        images = [IMAGE, _OTHER, _LARGE]
        await asyncio.gather(
            *(
                stores[n % 2].add_images(ref(attempt), images[:: 1 if n % 3 else -1])
                for n, attempt in enumerate(attempts)
            )
        )
        assert await stores[1].images(_ALL) == {image.digest: image for image in images}

    async def test_a_wrong_image_is_refused(self, store: Store) -> None:
        attempt = await start(store)
        for wrong in (
            msgspec.structs.replace(IMAGE, data=b"other bytes"),
            msgspec.structs.replace(IMAGE, digest=IMAGE.digest.upper()),
            msgspec.structs.replace(IMAGE, digest=""),
        ):
            with pytest.raises(DataError, match="its SHA-256 digest is"):
                await store.add_images(ref(attempt), [_OTHER, wrong])
        for media_type in ("", "image/", "text/html", "image/png\x00", "image/png; a=b", "png"):
            with pytest.raises(DataError, match="types are such as image/png"):
                await store.add_images(ref(attempt), [Image.of(IMAGE.data, media_type)])
        assert await store.images([IMAGE.digest, ""]) == {}

    async def test_an_unknown_attempt(self, store: Store) -> None:
        unknown = Attempt(attempt_id="at-nobody", rollout_id="ro-1", number=1, epoch=1)
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.add_images(ref(unknown), [IMAGE])
        assert await store.images(_ALL) == {}

    async def test_an_attempt_that_has_ended(self, store: Store) -> None:
        attempt = await start(store)
        await store.report([make_report(attempt)])
        await store.add_images(ref(attempt), [IMAGE])
        assert await store.images(_ALL) == {IMAGE.digest: IMAGE}

    async def test_a_record_has_its_images_without_bytes(self, store: Store) -> None:
        attempt = await start(store)
        image = PromptImage(digest=IMAGE.digest, grid=(2, 3), start=1, length=2, first=4)
        call = make_call(attempt)
        [record] = call.records
        record = msgspec.structs.replace(record, images=(image,))
        await store.add_calls([msgspec.structs.replace(call, records=[record])])
        assert await records_of(store, attempt) == [record]

    async def test_an_image_goes_with_its_last_attempt(self, store: Store, clock: Clock) -> None:
        await store.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        first, second = await claim_one(store), await claim_one(store)
        await store.add_images(ref(first), [IMAGE, _OTHER])
        await store.add_images(ref(second), [IMAGE, _LARGE])
        await store.report([make_report(first)])
        clock.advance(2 * _DAY_S)
        await store.report([make_report(second)])
        last = await start(store, "ro-3")
        await store.report([make_report(last)])
        assert await store.prune(_DAY_S) == 1
        assert set(await store.images(_ALL)) == {IMAGE.digest, _LARGE.digest}
        clock.advance(2 * _DAY_S)
        assert await store.prune(_DAY_S) == 1
        assert await store.images(_ALL) == {}
        await store.add_images(ref(last), [IMAGE])
        assert await store.images(_ALL) == {IMAGE.digest: IMAGE}

    async def test_pruning_while_another_attempt_gets_the_image(
        self, stores: list[Store], clock: Clock
    ) -> None:
        """An image that is added again while its last attempt is deleted stays."""
        store, other = stores
        for number in range(20):
            image = Image.of(b"%d" % number, "image/png")
            old = await start(store, f"ro-{number}-old")
            await store.add_images(ref(old), [image])
            await store.report([make_report(old)])
            clock.advance(2 * _DAY_S)
            new = await start(store, f"ro-{number}-new")
            await asyncio.gather(store.prune(_DAY_S), other.add_images(ref(new), [image]))
            assert await store.images([image.digest]) == {image.digest: image}
            await store.report([make_report(new)])
