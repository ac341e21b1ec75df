"""What the data section and the sampling section become, once there is a tokenizer."""

from types import SimpleNamespace

import pytest
from commands import MINIMAL, compose

from ppo_ds.errors import UserError
from ppo_ds.inputs import stop_ids

VOCABULARY = {"a": 0, "b": 1, "c": 2, "far": 9}  # four tokens, with a gap
TOKENIZER = SimpleNamespace(stop_ids=(2,), vocab_size=4, hf=SimpleNamespace(get_vocab=lambda: VOCABULARY))


@pytest.mark.parametrize(("given", "ids"), [("null", (2,)), ("[]", ()), ("[0,3]", (0, 3)), ("[9]", (9,))])
def test_the_tokens_that_end_an_answer(given, ids):
    assert stop_ids(compose(*MINIMAL, f"sampling.stop_token_ids={given}"), TOKENIZER) == ids


@pytest.mark.parametrize("given", ["[4]", "[1,4]"])
def test_a_stop_id_that_is_no_token(given):
    with pytest.raises(UserError) as error:
        stop_ids(compose(*MINIMAL, f"sampling.stop_token_ids={given}"), TOKENIZER)
    (line,) = error.value.problems
    assert line == "sampling.stop_token_ids: 4 is none: the actor's tokenizer has 4 tokens; leave it out, or null takes the model's own ends"
