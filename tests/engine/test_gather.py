"""Tests the chunks in which sharded parameters are gathered."""

import pytest

from ppo_ds.engine.gather import chunked


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ([], []),
        ([3], [[3]]),
        ([4, 6], [[4, 6]]),  # reaches the limit with its last item
        ([4, 6, 1], [[4, 6], [1]]),
        ([9, 5, 2, 20, 1, 1], [[9, 5], [2, 20], [1, 1]]),
        ([10, 10, 10], [[10], [10], [10]]),
    ],
)
def test_a_chunk_ends_with_the_item_that_reaches_the_limit(sizes, chunks):
    assert list(chunked(sizes, lambda size: size, 10)) == chunks
