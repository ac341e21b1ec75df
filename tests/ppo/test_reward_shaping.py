"""Tests the shaping of scores before PPO uses them: the order of steps, the moments, the penalties."""

from dataclasses import replace

import pytest

from tests.ppo.algo_cases import answers, shaper


def shaped(found):
    after, before = found
    return after.tolist(), before.tolist()


def test_penalties_then_the_normaliser_then_the_clip(world):
    """Scores are 3 and -3; the second response is truncated and gets a penalty of -2, so its score is -5.

    The mean is -1 and the population deviation 4, which gives 1 and -1, clipped to 0.5 and -0.5.
    """
    rollout = answers([2, 1], [3.0, -3.0], finished=[True, False])
    make = shaper(world, normalize="running", clip=0.5, missing_eos="subtract", missing_eos_value=2.0)
    assert shaped(make(rollout)) == ([0.5, -0.5], [1.0, -1.0])
    assert (make.moments.count, make.moments.mean) == (2, -1)
    assert rollout.scores.tolist() == [3.0, -3.0]


ROUNDS = [[1.0, 3.0], [5.0, 7.0], [9.0, 11.0]]


def rounds(make):
    return [make(answers([1, 1], scores))[0].tolist() for scores in ROUNDS]


@pytest.mark.parametrize(
    ("normalize", "with_std", "expected"),
    [
        # running mean and deviation: 2 and 1; 4 and sqrt(5); 6 and sqrt(35 / 3)
        ("running", True, [[-1, 1], [1 / 5**0.5, 3 / 5**0.5], [3 / (35 / 3) ** 0.5, 5 / (35 / 3) ** 0.5]]),
        ("running", False, [[-1, 1], [1, 3], [3, 5]]),
        ("first", True, [[-1, 1], [3, 5], [7, 9]]),  # the first rollout's mean 2 and deviation 1 are kept
        ("first", False, [[-1, 1], [3, 5], [7, 9]]),
        ("none", True, ROUNDS),
    ],
)
def test_moments_of_all_scores_or_of_the_first_rollout(world, normalize, with_std, expected):
    found = rounds(shaper(world, normalize=normalize, with_std=with_std))
    for scores, wanted in zip(found, expected, strict=True):
        assert scores == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("normalize", ["running", "first"])
def test_two_ranks_equal_one(on_ranks, world, normalize):
    whole = rounds(shaper(world, normalize=normalize))

    def work(world):
        make = shaper(world, normalize=normalize)
        return [make(answers([1], [scores[world.rank]]))[0].item() for scores in ROUNDS]

    first, second = on_ranks(2, work)
    assert [list(pair) for pair in zip(first, second, strict=True)] == [pytest.approx(pair) for pair in whole]


@pytest.mark.parametrize("normalize", ["running", "first"])
def test_a_resumed_shaper_continues_unchanged(world, normalize):
    whole = rounds(shaper(world, normalize=normalize))
    before, after = shaper(world, normalize=normalize), shaper(world, normalize=normalize)
    before(answers([1, 1], ROUNDS[0]))
    after.load_state_dict(before.state_dict())
    assert [after(answers([1, 1], scores))[0].tolist() for scores in ROUNDS[1:]] == whole[1:]


# -- penalties -----------------------------------------------------------------------------------------------


EOS_SET = dict(missing_eos="set", missing_eos_value=-3.0)
EOS_SUBTRACTED = dict(missing_eos="subtract", missing_eos_value=1.0)


@pytest.mark.parametrize(
    ("lengths", "limits", "finished", "penalties", "expected"),
    [
        ([3, 1, 0], None, None, dict(length_penalty=0.25), [0.25, 0.75, 1.0]),
        ([3, 1, 0], None, None, dict(length_penalty=-1.0), [4.0, 2.0, 1.0]),
        # the length penalty comes before that of a missing end
        ([2, 2], None, [True, False], EOS_SET | dict(length_penalty=0.5), [0.0, -3.0]),
        ([2, 2], None, [True, False], EOS_SUBTRACTED | dict(length_penalty=0.5), [0.0, -1.0]),
        # a response loses up to 3 over the last two tokens before its own limit
        ([3, 5, 6, 3, 6], [6, 6, 6, 4, 20], None, dict(overlong_buffer=2, overlong_factor=3.0),
         [1, -0.5, -2, -0.5, 1]),
        # the ramp is 0.2 of the limit, rounded up: 1 token for limits 4 and 5, 2 for 10, and 3 for 12
        ([9, 10, 4, 5, 4, 10, 11], [10, 10, 5, 5, 4, 12, 12], None,
         dict(overlong_buffer=0.2, overlong_factor=1.0), [1 / 2, 0, 1, 0, 0, 2 / 3, 1 / 3]),
        # a ramp of 8 tokens is shortened to the limit
        ([0, 2, 4], [4, 4, 4], None, dict(overlong_buffer=8, overlong_factor=1.0), [1.0, 0.5, 0.0]),
    ],
)  # fmt: skip
def test_penalties(world, lengths, limits, finished, penalties, expected):
    """All scores are 1. Lengths count all generated tokens, also an end token that is not an action."""
    rollout = answers(lengths, [1.0] * len(lengths), limits=limits, finished=finished)
    hidden = replace(rollout, response_mask=rollout.response_mask.roll(-1, 1))
    for rows in (rollout, hidden) if "length_penalty" in penalties else (rollout,):
        assert shaper(world, **penalties)(rows)[0].tolist() == pytest.approx(expected)


def test_the_score_of_an_unfinished_response_is_on_the_normalised_scale(world):
    """Scores are 1 (finished) and -2 (truncated), with mean -0.5.

    The finished response gets 1.5, and the truncated response exactly the configured score.
    """
    make = shaper(
        world, normalize="first", with_std=False, clip=None, missing_eos="set", missing_eos_value=-1.0
    )
    rollout = answers([2, 2], [1.0, -2.0], finished=[True, False])
    assert make(rollout)[0].tolist() == [1.5, -1.0]
    assert make.moments.mean == -0.5  # of the original scores
