"""Test the images of prompts: keys that identify prompts, and the bytes of images."""

import hashlib

import pytest
from hypothesis import given, strategies as st

from lightspan.schema.images import Image, PromptImage, prompt_key, with_data
from lightspan.schema.token_records import TokenRecord, pack_ids

PAD = 7
DIGESTS = [hashlib.sha256(bytes([n])).hexdigest() for n in range(3)]


def run(digest, start, length, grid=(2, 2), first=0):
    return PromptImage(digest=digest, grid=grid, start=start, length=length, first=first)


@st.composite
def prompts(draw):
    """Draw the parts of a prompt: a text token, or an image of one of three files and two sizes."""
    text = st.integers(0, 3)
    image = st.tuples(st.sampled_from(DIGESTS), st.sampled_from([(1, 6), (2, 3)]))
    return draw(st.lists(st.one_of(text, image), max_size=8))


def built(parts):
    """Return the ids and the images of a prompt of these parts."""
    ids, images = [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            images.append(run(part[0], len(ids), 6, part[1]))
            ids += [PAD] * 6
    return pack_ids(ids), images


@given(first=prompts(), second=prompts())
def test_equal_keys_mean_equal_ids_and_images(first, second):
    (one, images), (other, others) = built(first), built(second)
    assert (prompt_key(one, images) == prompt_key(other, others)) == (first == second)
    assert len(prompt_key(one, images)) == len(one)


@given(first=prompts(), second=prompts())
def test_a_key_begins_with_another_exactly_if_the_prompt_does(first, second):
    key, other = prompt_key(*built(first)), prompt_key(*built(second))
    assert key.startswith(other) == (first[: len(second)] == second)
    assert prompt_key(*built(first + second)).startswith(key)


def test_a_prompt_without_images_is_its_own_key():
    assert prompt_key(b"\x01\x00\x00\x00", ()) == b"\x01\x00\x00\x00"


def test_tiles_of_one_image_have_keys_of_their_own():
    ids = pack_ids([PAD] * 4)
    tiles = prompt_key(ids, [run(DIGESTS[0], 0, 2), run(DIGESTS[0], 2, 2, first=2)])
    assert tiles[:8] != tiles[8:]


def test_a_record_is_identified_by_its_ids_and_images():
    fields = {"attempt_id": "at", "call_id": "c", "choice": 0, "policy": "p"}
    fields |= {"response_ids": [1], "logprobs": [-1.0], "versions": [(1, 1)]}
    ids = [1, PAD, PAD, 2]
    first, second = (
        TokenRecord.create(prompt_ids=ids, images=(run(digest, 1, 2),), **fields)
        for digest in DIGESTS[:2]
    )
    assert first.prompt == second.prompt
    assert first.prompt_key != second.prompt_key
    assert first.prompt_key[:4] == second.prompt_key[:4] == pack_ids([1])
    assert first.prompt_key[12:] == second.prompt_key[12:] == pack_ids([2])


def test_images_get_their_bytes_or_none_if_one_is_missing():
    file = Image.of(b"png", "image/png")
    assert file.digest == hashlib.sha256(b"png").hexdigest()
    known, unknown = run(file.digest, 0, 2), run(DIGESTS[0], 2, 2)
    [image] = with_data([known], {file.digest: file})
    assert (image.data, image.key) == (b"png", known.key)
    assert with_data([known, unknown], {file.digest: file}) is None


@pytest.mark.parametrize("change", [{"grid": (4, 1)}, {"first": 1}, {"digest": DIGESTS[1]}])
def test_the_key_of_a_run_has_all_but_the_bytes(change):
    fields = {"digest": DIGESTS[0], "start": 0, "length": 2, "grid": (2, 2), "first": 0}
    image = PromptImage(**fields)
    assert image.key != PromptImage(**{**fields, **change}).key
    assert image.key == PromptImage(**fields, data=b"x").key
