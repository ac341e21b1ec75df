"""Tests the choice of the decode backend: the first that is available and agrees with training."""

import pytest

from ppo_ds.assemble.generator import choose_backend
from ppo_ds.errors import UserError
from ppo_ds.ppo.health import ParityError

GOOD, BAD = (1e-6, 1e-5), (0.5, 2.0)


@pytest.fixture
def chosen():
    """Returns a function that chooses a backend in fp32.

    Each argument is a backend: either the reason why it is unavailable (str), or its gap to training. The
    results are the BackendChoice and the list of the backends tried.
    """

    def run(**backends):
        tried = []
        choice = choose_backend(
            list(backends),
            refusal=lambda name: backends[name] if isinstance(backends[name], str) else None,
            gap_of=lambda name: tried.append(name) or backends[name],
            dtype="fp32",
        )
        return choice, tried

    return run


def test_the_first_backend_that_agrees_with_training_is_chosen(chosen):
    choice, tried = chosen(static=GOOD, hf=(0.0, 0.0))
    assert (choice.backend, choice.gap, choice.incapable, choice.disagreeing) == (
        "static",
        GOOD,
        (),
        (),
    ) and tried == ["static"]


def test_an_unavailable_backend_is_not_tried_and_its_reason_is_reported(chosen):
    choice, tried = chosen(static="no cache to write into", hf=GOOD)
    assert (
        choice.backend == "hf"
        and choice.incapable == ("static: no cache to write into",)
        and choice.disagreeing == ()
        and tried == ["hf"]
    )


def test_a_backend_that_is_out_of_bounds_is_skipped_with_its_gap(chosen):
    choice, tried = chosen(static=BAD, hf=GOOD)
    assert (
        choice.backend == "hf" and choice.gap == GOOD and choice.incapable == () and tried == ["static", "hf"]
    )
    (line,) = choice.disagreeing
    assert (
        line.startswith("static: ")
        and "differ by 0.5 nats on average (at most 2), allowed for fp32 is 0.001" in line
    )


def test_nan_is_out_of_bounds(chosen):
    assert chosen(static=(float("nan"), 0.0), hf=GOOD)[0].backend == "hf"


def test_a_named_backend_is_used_or_the_run_fails(chosen):
    with pytest.raises(
        UserError, match=r"^rollout.backend=static: a sliding window; use rollout.backend=auto$"
    ):
        chosen(static="a sliding window")
    with pytest.raises(ParityError, match=r"differ by 0.5 nats.*rollout.backend=static"):
        chosen(static=BAD)


def test_the_run_stops_if_no_backend_agrees(chosen):
    with pytest.raises(ParityError, match="rollout.backend=hf"):
        chosen(static=BAD, hf=BAD)
