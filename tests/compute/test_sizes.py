"""Tests the FLOPs and bytes of a forward against numbers computed by hand.

The model has 2 layers of width 8 with 2 query heads and 1 key head of size 4, an MLP of 16, a vocabulary of
10, and no biases.
"""

from ppo_ds.compute.sizes import Size, causal_pairs, decode_bytes, forward_flops

# A layer: q 8x8=64, k 4x8=32, v 32, o 64, gate 16x8=128, up 128, down 128, two norms of 8: together 592. Two
# layers and the last norm have 1192, and the head 10x8=80 parameters.
SIZE = Size(body=1192, head=80, layers=2, width=8, kv_width=4)


def test_a_row_of_three_tokens_attends_to_six_positions():
    assert causal_pairs([3]) == 6  # 1 + 2 + 3
    assert causal_pairs([3, 1]) == 7
    assert causal_pairs([]) == 0


def test_a_forward_over_three_tokens():
    # the body: 3 tokens x 1192 weights x 2 = 7152
    # attention: 6 pairs x 2 layers x (a product of 8 with the key and a product of 8 with the value, 2 FLOPs
    # each: 32) = 384
    # the head at 2 positions: 2 x 80 x 2 = 320
    assert forward_flops(SIZE, tokens=3, pairs=6, head_positions=2) == 7152 + 384 + 320


def test_a_head_at_no_position_costs_nothing():
    assert forward_flops(SIZE, tokens=3, pairs=6, head_positions=0) == 7536


def test_bytes_of_two_decode_steps():
    # two rows whose steps read contexts of 5 and 6, then 6 and 7 positions: 24 in all. Keys and values of a
    # position: 2 layers x 2 x 4 = 16 numbers, 24 x 16 = 384.
    # weights: 2 steps x (1192 + 80) = 2544. In bf16: (2544 + 384) x 2
    assert decode_bytes(SIZE, steps=2, contexts=24, bytes_each=2) == 5856
