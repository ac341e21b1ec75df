"""Tests ids of encoded texts, derived by hand: a byte's id is 5 + its index in the byte-level alphabet."""

import pytest

from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.text import EncodedText, TextEncoder, collate
from tests.rewards.reward_cases import BOS, CHAT_TEMPLATE, CLS, EOS, SEP, save_tokenizer

ROW = {"prompt_text": "hi"}
CHAT = {
    "prompt_text": "<sys>be<eos><usr>hi<eos>",
    "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
}


@pytest.fixture
def make(tmp_path):
    def encoder(style, max_tokens=None, append_eos=None, actors_vocabulary=True, **tokenizer):
        own = load_tokenizer(save_tokenizer(tmp_path / "rm", **tokenizer))
        return TextEncoder(own, style, max_tokens, append_eos, "reward.parts.rm.reward", actors_vocabulary)

    return encoder


@pytest.fixture
def ids(tokenizer):
    return lambda text: tokenizer.encode_many([text], special_tokens=False)[0]


def test_concat(make, ids):
    assert ids("hi") == [ids("h")[0], ids("i")[0]]  # one id per byte
    encode = make("concat")
    assert encode(ROW, "yo", True).ids == [BOS, *ids("hiyo"), EOS]
    # truncated at the length limit, so without an end token
    assert encode(ROW, "yo", False).ids == [BOS, *ids("hiyo")]
    assert encode(ROW, "", True).ids == [BOS, *ids("hi"), EOS]
    assert encode(ROW, "", False).ids == [BOS, *ids("hi")]
    assert encode(ROW, "yo", True).types is None


@pytest.mark.parametrize(
    ("append_eos", "finished", "end"),
    [(True, False, [EOS]), (True, True, [EOS]), (False, True, []), (False, False, [])],
)
def test_append_eos(make, ids, append_eos, finished, end):
    assert make("concat", append_eos=append_eos)(ROW, "yo", finished).ids == [BOS, *ids("hiyo"), *end]


def test_a_rendered_chat_gets_no_second_bos(make, ids):
    assert make("concat")({"prompt_text": "<bos>hi"}, "yo", True).ids == [BOS, *ids("hiyo"), EOS]


def test_concat_of_a_chat_has_markup_only_of_the_same_vocabulary(make, ids):
    assert make("concat")(CHAT, "yo", True).ids == [BOS, *ids("<sys>be<eos><usr>hi<eos>yo"), EOS]
    foreign = make("concat", actors_vocabulary=False)
    assert foreign(CHAT, "yo", True).ids == [BOS, *ids("be\nhi\nyo"), EOS]
    assert foreign(ROW, "yo", True).ids == [BOS, *ids("hiyo"), EOS]


@pytest.mark.parametrize("max_tokens", [3, 4, 5, 6])
def test_concat_is_truncated_on_the_left(make, ids, max_tokens):
    room = max_tokens - 2  # for <bos> and <eos>
    assert make("concat", max_tokens)(ROW, "yo", True).ids == [BOS, *ids("hiyo"[-room:]), EOS]


def test_chat(make, ids):
    encode = make("chat", template=CHAT_TEMPLATE)
    assert encode(CHAT, "yo", True).ids == ids("<system>be<eos><user>hi<eos><assistant>yo<eos>")
    assert encode(CHAT, "yo", False).ids == encode(CHAT, "yo", True).ids  # the template ends the turn
    assert encode(ROW, "", True).ids == ids("<user>hi<eos><assistant><eos>")
    assert encode(ROW, "yo", True).ids.count(EOS) == 2
    # the end token is not added twice
    assert make("chat", template=CHAT_TEMPLATE, append_eos=True)(ROW, "yo", False).ids[-2:] == [
        *ids("o"),
        EOS,
    ]
    assert make("chat", max_tokens=4, template=CHAT_TEMPLATE)(ROW, "yo", True).ids == [*ids(">yo"), EOS]


def test_pair(make, ids):
    encode = make("pair", cross_encoder=True)
    text = encode(ROW, "yo!", True)
    assert text.ids == [CLS, *ids("hi"), SEP, *ids("yo!"), SEP] and text.types == [0, 0, 0, 0, 1, 1, 1, 1]
    # a pair has none of the actor's markup
    assert encode(CHAT, "yo", True).ids == [CLS, *ids("be\nhi"), SEP, *ids("yo"), SEP]
    assert encode(ROW, "", True).ids == [CLS, *ids("hi"), SEP, SEP]


def test_a_pair_loses_the_beginning_of_its_prompt_first(make, ids):
    def cut(max_tokens):
        return make("pair", max_tokens, cross_encoder=True)({"prompt_text": "abcdef"}, "uvwxyz", True).ids

    assert cut(15) == [CLS, *ids("abcdef"), SEP, *ids("uvwxyz"), SEP]
    assert cut(12) == [CLS, *ids("def"), SEP, *ids("uvwxyz"), SEP]
    assert cut(10) == [CLS, *ids("f"), SEP, *ids("uvwxyz"), SEP]
    # if both do not fit, the longer text is truncated first, on the left
    assert cut(9) == [CLS, *ids("def"), SEP, *ids("xyz"), SEP]
    assert cut(5) == [CLS, *ids("f"), SEP, *ids("z"), SEP]


def test_impossible_settings(make):
    with pytest.raises(UserError, match="^reward.parts.rm.reward.template=chat"):
        make("chat")
    with pytest.raises(UserError, match="^reward.parts.rm.reward.append_eos=true"):
        make("pair", append_eos=True, cross_encoder=True)


def test_a_template_that_refuses_a_role_names_the_remedy(make):
    encode = make(
        "chat",
        template=(
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not "
            "supported') }}{% endif %}"
        )
        + CHAT_TEMPLATE,
    )
    assert len(encode(ROW, "yo", True))
    with pytest.raises(RewardError) as caught:
        encode(CHAT, "yo", True)
    assert str(caught.value) == (
        "reward.parts.rm.reward.template=chat: the reward model's chat template refuses a chat with the "
        "roles system, user, assistant "
        "(TemplateError: System role not supported); set reward.parts.rm.reward.template=pair or "
        "reward.parts.rm.reward.template=concat"
    )


def test_padding_on_either_side_worked_by_hand():
    """The second text is two tokens shorter; ids, mask and token types are padded alike."""
    texts = [EncodedText([5, 6, 7], [0, 0, 1]), EncodedText([8], [1])]
    ids, mask, types = collate(texts, 9)
    assert ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert mask.int().tolist() == [[1, 1, 1], [1, 0, 0]] and types.tolist() == [[0, 0, 1], [1, 0, 0]]
    ids, mask, types = collate(texts, 9, "left")
    assert ids.tolist() == [[5, 6, 7], [9, 9, 8]]
    assert mask.int().tolist() == [[1, 1, 1], [0, 0, 1]] and types.tolist() == [[0, 0, 1], [0, 0, 1]]
    assert collate([EncodedText([5], None)], 9, "left")[2] is None
