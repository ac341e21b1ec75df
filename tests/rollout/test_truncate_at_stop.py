"""Tests truncate_at_stop() on responses worked out by hand."""

import pytest
import torch

from ppo_ds.rollout.base import StopStrings, truncate_at_stop

PAD, EOS = 0, 1
TEXTS = {0: "<pad>", 1: "", 2: "a", 3: "b", 4: "c", 5: "ab", 6: "cab", 7: "\n"}


class Texts:
    """A tokenizer that decodes ids with TEXTS."""

    def __init__(self, pad_id=PAD):
        self.pad_id = pad_id

    def decode(self, ids, *, skip_special_tokens):
        assert not skip_special_tokens  # the text of a special token can be a stop string
        return "".join(TEXTS[i] for i in ids)


@pytest.fixture
def cut(prompts, sampling):
    """Truncates raw responses; their log-probs are -1, -2, ..."""

    def run(*responses, prompt=(9, 9), stop=(EOS,), strings=(), pad=PAD, lengths=None):
        responses = torch.tensor(responses)
        lengths = None if lengths is None else torch.tensor(lengths)
        logprobs = -torch.arange(1.0, responses.shape[1] + 1).repeat(len(responses), 1)
        rollout = truncate_at_stop(
            prompts(*[prompt] * len(responses)), responses, logprobs, tokenizer=Texts(pad), lengths=lengths,
            sampling=sampling(responses.shape[1], stop_token_ids=stop, stop_strings=strings),
        )  # fmt: skip
        assert rollout.attention_mask[:, len(prompt) :].equal(rollout.response_mask)
        return rollout

    return run


def lengths(rollout):
    return rollout.response_mask.sum(1).tolist()


def test_the_stop_token_is_part_of_the_response(cut):
    rollout = cut([2, EOS, 3, 4], [2, 3, 4, EOS], [2, 3, 4, 2], [EOS, 2, 3, 4])
    assert lengths(rollout) == [2, 4, 4, 1]
    assert rollout.finished.tolist() == [
        True,
        True,
        False,
        True,
    ]  # True even if the end token is in the last position, False without one
    assert rollout.ids[:, 2:].tolist() == [
        [2, EOS, PAD, PAD],
        [2, 3, 4, EOS],
        [2, 3, 4, 2],
        [EOS, PAD, PAD, PAD],
    ]
    assert rollout.logprobs.tolist() == [[-1, -2, 0, 0], [-1, -2, -3, -4], [-1, -2, -3, -4], [-1, 0, 0, 0]]


def test_nan_logprobs_after_the_end_are_replaced(prompts, sampling):
    logprobs = torch.tensor([[-1.0, float("nan"), float("-inf")]])
    rollout = truncate_at_stop(
        prompts([9]),
        torch.tensor([[EOS, 2, 3]]),
        logprobs,
        sampling=sampling(3, stop_token_ids=(EOS,)),
        tokenizer=Texts(),
    )
    assert rollout.logprobs.tolist() == [[-1.0, 0.0, 0.0]]


def test_pad_is_eos(cut):
    """An end token in a chat prompt is attended to, and an end token in the response is its last action.

    Padding after the end token is neither attended to nor an action.
    """
    rollout = cut([2, EOS, EOS, EOS], [EOS, EOS, EOS, EOS], prompt=(9, EOS, 8), pad=EOS)
    assert rollout.attention_mask.tolist() == [[True] * 5 + [False] * 2, [True] * 4 + [False] * 3]
    assert lengths(rollout) == [2, 1] and rollout.finished.all()


@pytest.mark.parametrize(
    ("responses", "stops", "wanted", "finished"),
    [
        # the first of several stop ids
        ([[2, 4, EOS, 3], [2, EOS, 4, 3], [2, 2, 2, 4]], {"stop": (EOS, 4)}, [2, 2, 4], [True] * 3),
        # pad inside a response is an action, and rubbish after a stop does not count
        ([[PAD, 2, EOS, 3], [2, EOS, PAD, EOS]], {}, [3, 2], [True, True]),
        ([[EOS, PAD, EOS]], {"stop": ()}, [3], [False]),
        # "ab" after two tokens; EOS first; "ca" and EOS, so that "ab" across it is ignored; none; at the end
        (
            [[2, 3, EOS, 4], [2, EOS, 3, 4], [4, 2, EOS, 3], [4, 4, 4, 4], [4, 4, 2, 3]],
            {"strings": ("ab",)},
            [2, 2, 3, 4, 4],
            [True, True, True, False, True],
        ),
        # within and across tokens
        (
            [[6, 4, 4], [4, 5, 4], [4, 2, 6], [3, 2, 4]],
            {"strings": ("ab",)},
            [1, 2, 3, 3],
            [True] * 3 + [False],
        ),
        ([[2, 7, 7, 2, 3]], {"strings": ("ab", "\n\n")}, [3], [True]),  # the earliest of several
        ([[EOS, 2, 3, 4], [EOS, 4, 4, 4]], {"stop": (), "strings": ("ab",)}, [3, 4], [True, False]),
    ],
)
def test_the_first_stop_ends_a_response(cut, responses, stops, wanted, finished):
    rollout = cut(*responses, **stops)
    assert lengths(rollout) == wanted and rollout.finished.tolist() == finished
    for ids, length in zip(rollout.ids[:, 2:].tolist(), wanted, strict=True):
        assert ids[length:] == [PAD] * (len(ids) - length)


def limited(prompts, sampling, limits, responses, **knobs):
    """Truncates raw responses at the limits of their rows; the sampling parameters allow 4 tokens."""
    rows = prompts(*[[9]] * len(responses), limits=limits)
    return truncate_at_stop(
        rows,
        torch.tensor(responses),
        torch.full((len(responses), len(responses[0])), -1.0),
        sampling=sampling(4, **knobs),
        tokenizer=Texts(),
    )


def test_each_row_is_cut_at_its_own_limit(prompts, sampling):
    rollout = limited(
        prompts, sampling, [1, 3, 4, 99, 2], [[2, 3, 4, 2]] * 4 + [[EOS, 2, 2, 2]], stop_token_ids=(EOS,)
    )
    assert lengths(rollout) == [1, 3, 4, 4, 1] and rollout.limits.tolist() == [1, 3, 4, 4, 2]
    assert rollout.finished.tolist() == [False, False, False, False, True]
    assert rollout.ids[:, 1:].tolist() == [
        [2, PAD, PAD, PAD],
        [2, 3, 4, PAD],
        [2, 3, 4, 2],
        [2, 3, 4, 2],
        [EOS, PAD, PAD, PAD],
    ]
    assert rollout.logprobs[0].tolist() == [-1, 0, 0, 0]


def test_a_stop_in_the_last_place_allowed_is_a_stop_and_a_later_one_was_never_generated(prompts, sampling):
    rows = [
        [EOS, 2, 3, 4],
        [2, EOS, 3, 4],
        [2, 3, EOS, 4],
        [4, 2, 3, EOS],
        [4, 2, 3, EOS],
        [5, 4, 4, 4],
        [2, 2, 2, 3],
        [2, 2, 2, 3],
    ]
    rollout = limited(
        prompts, sampling, [1, 2, 1, 3, 2, 1, 4, 3], rows, stop_token_ids=(EOS,), stop_strings=("ab",)
    )
    # by row: EOS at the limit; EOS at the limit; EOS after the limit; "ab" at the limit; the limit is before
    # its "b"; "ab" in the only token; "ab" in the last position of the width; "ab" after the limit
    assert lengths(rollout) == [1, 2, 1, 3, 2, 1, 4, 3]
    assert rollout.finished.tolist() == [True, True, False, True, False, True, True, False]


def test_the_prefix_length_is_that_of_the_shortest_prefix_with_a_stop_string():
    for ids in ([2], [5], [2, 3], [4, 4, 2, 3, 5, 5], [6, 6], [2, 2, 2], [4] * 9 + [2, 3] + [4] * 7):
        holding = [n for n in range(len(ids) + 1) if "ab" in "".join(TEXTS[i] for i in ids[:n])]
        assert StopStrings(("ab",), Texts()).prefix_length(ids) == (holding[0] if holding else len(ids) + 1)


def test_rows_that_the_backend_ended_before_a_stop_and_before_their_limit(cut):
    """``lengths`` ends a row without a stop, and nothing after it is read; -1 is not in the vocabulary.

    A stop before this length still ends the row. A stop token or stop string that is complete only after the
    length was not generated, and is ignored.
    """
    rollout = cut(
        [4, 4, -1, -1], [4, EOS, 4, -1], [4, 4, EOS, -1], [4, 2, 3, -1], [4, 2, 3, -1], [4, 4, 4, 4],
        lengths=[2, 3, 2, 2, 3, 9], strings=("ab",),
    )  # fmt: skip
    assert lengths(rollout) == [2, 2, 2, 2, 3, 4]
    assert rollout.finished.tolist() == [False, True, False, False, True, False]
    assert rollout.limits.tolist() == [4] * 6
    assert rollout.ids[0].tolist() == [9, 9, 4, 4, PAD, PAD]
    assert rollout.logprobs[0].tolist() == [-1, -2, 0, 0]


class FirstSpaceDropped(Texts):
    """A tokenizer that drops a space at the beginning of a text, as some tokenizers do."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join({0: "x", 1: " ", 2: "b"}[i] for i in ids).removeprefix(" ")


def test_the_window_holds_a_stop_string_whose_first_space_is_dropped():
    """The last two tokens by themselves would be decoded as "b", not " b"."""
    stops = StopStrings((" b",), FirstSpaceDropped())
    assert stops.found_in(([0] * 9 + [1, 2])[-stops.window :])
