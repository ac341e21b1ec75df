"""Tests tokenizer loading with a byte-level tokenizer.

It has one id per byte, so that every expected number can be counted by hand.
"""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ppo_ds.config.chat_template import template_text
from ppo_ds.errors import UserError
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.models.tokenizer import load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if no_think %}[]{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]


def saved(folder, *, eos="<eos>", pad="<pad>", template=None, bos=True):
    """Saves a tokenizer with the ids <bos> 0, <eos> 1 and <pad> 2, followed by the 256 bytes."""
    vocab = {
        token: i
        for i, token in enumerate(["<bos>", "<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token=eos, pad_token=pad)
    hf.chat_template = template
    hf.save_pretrained(folder)
    return str(folder)


def test_pad_and_stop_ids(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path))
    assert (tokenizer.pad_id, tokenizer.stop_ids, tokenizer.vocab_size) == (2, (1,), 259)


@pytest.mark.parametrize("text", ["a , b .", "do n't ?", " a  b ", "\n<answer> 4 </answer>"])
def test_decoding_keeps_all_spaces(tmp_path, text):
    """transformers cleans up the spaces of all tokenizers except those with byte-pair encoding."""
    for tokenizer in (load_tokenizer(saved(tmp_path)), character_tokenizer("\n '<>,./?4abdenorstw")):
        assert tokenizer.decode(tokenizer.encode_many([text], special_tokens=True)[0]) == text


def test_without_a_pad_token_eos_pads_and_the_tokenizer_stays_as_it_was(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path / "a", pad=None))
    assert tokenizer.pad_id == 1
    tokenizer.save(tmp_path / "b")
    assert load_tokenizer(str(tmp_path / "b")).hf.pad_token is None


def test_neither_pad_nor_eos_is_an_error(tmp_path):
    with pytest.raises(UserError, match="^reward.model.path=.*neither a pad nor an end token"):
        load_tokenizer(saved(tmp_path, eos=None, pad=None), key="reward.model.path")


@pytest.mark.parametrize(("named", "stop_ids"), [([7, 1], (1, 7)), (7, (1, 7)), (None, (1,))])
def test_generation_config_adds_end_tokens(tmp_path, named, stop_ids):
    saved(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert load_tokenizer(str(tmp_path)).stop_ids == stop_ids


def test_generation_config_alone_can_give_the_pad_id(tmp_path):
    saved(tmp_path, eos=None, pad=None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.pad_id, tokenizer.stop_ids) == (5, (5, 6))


def test_broken_generation_config_is_an_error(tmp_path):
    saved(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos')
    with pytest.raises(UserError, match="generation_config.json"):
        load_tokenizer(str(tmp_path))


def test_text_gets_the_bos_and_a_chat_gets_it_once(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path, template=TEMPLATE))
    assert (
        tokenizer.encode_many(["a"], special_tokens=True)[0][0] == 0
        and len(tokenizer.encode_many(["a"], special_tokens=True)[0]) == 2
    )
    assert tokenizer.render_chat(CHAT) == "<bos><user>hi<eos><assistant>"
    ids = tokenizer.encode_many([tokenizer.render_chat(CHAT)], special_tokens=False)[0]
    assert ids == tokenizer.hf.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids.count(0) == 1 and len(ids) == 1 + len("<user>hi") + 1 + len("<assistant>")


def test_template_from_a_file_with_arguments(tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(
        saved(tmp_path / "t"),
        chat_template=template_text(str(tmp_path / "chat.jinja")),
        chat_template_kwargs={"no_think": True},
    )
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(CHAT).endswith("<assistant>[]")


def test_given_template_replaces_the_tokenizers_own_and_is_saved(tmp_path):
    tokenizer = load_tokenizer(
        saved(tmp_path / "a", template=TEMPLATE), chat_template="{{ messages[0]['content'] }}!"
    )
    tokenizer.save(tmp_path / "b")
    assert load_tokenizer(str(tmp_path / "b")).render_chat(CHAT) == "hi!"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere.jinja", "No such file"),
        ("", "Is a directory"),
        ("latin.jinja", "utf-8"),
        ("x" * 300, "too long"),
    ],
)
def test_template_that_is_no_file(tmp_path, name, reason):
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(
        UserError,
        match=f"^data.chat_template=.*neither a Jinja template nor a file that can be read .*{reason}",
    ):
        template_text(str(tmp_path / name))


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (
            "{{ raise_exception('no system') }}",
            "refuses a chat with the roles user (TemplateError: no system)",
        ),
        (
            "{% for %}",
            "is not Jinja (line 1: TemplateSyntaxError: Expected an expression, "
            "got 'end of statement block')",
        ),
        (
            "{{ messages[0].nothing.more }}",
            "refuses a chat with the roles user (UndefinedError: 'dict object' has no attribute 'nothing')",
        ),
        (
            "{{ messages[0]['content'] + 1 }}",
            'refuses a chat with the roles user (TypeError: can only concatenate str (not "int") to str)',
        ),
        ("{{ 1 / 0 }}", "refuses a chat with the roles user (ZeroDivisionError: division by zero)"),
    ],
)
def test_template_that_cannot_be_rendered(tmp_path, template, fault):
    with pytest.raises(UserError) as caught:
        load_tokenizer(saved(tmp_path), chat_template=template).render_chat(CHAT)
    assert caught.value.problems == [f"the chat template {fault}; correct the row, or set data.chat_template"]


def test_arguments_that_no_template_takes(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path, template=TEMPLATE), chat_template_kwargs={"tokenize": True})
    with pytest.raises(UserError, match="the chat template .*tokenize"):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize(
    ("named", "pad", "bound"), [(None, "<pad>", 259), ([300, 7], "<pad>", 301), (None, None, 259)]
)
def test_ids_are_below(tmp_path, named, pad, bound):
    """The tokenizer has 259 tokens; the generation config may name an end token beyond them."""
    saved(tmp_path, pad=pad)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert load_tokenizer(str(tmp_path)).id_bound == bound


def test_ids_of_a_vocabulary_with_gaps(tmp_path):
    saved(tmp_path)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["model"]["vocab"]["\u0120"] = 999  # this character stands for the space
    file.write_text(json.dumps(tree))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.id_bound) == (259, 1000)


def test_chat_without_template(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="data.chat_template"):
        tokenizer.encode_many([tokenizer.render_chat(CHAT)], special_tokens=False)[0]


@pytest.mark.parametrize(
    "text", ["naïve 中文 \U0001f600 e\u0301 \u200f", "\x00\x01\t\r\n\x7f\u2028", " a  b , c ' s "]
)
def test_text_survives(tmp_path, text):
    tokenizer = load_tokenizer(saved(tmp_path))
    ids = tokenizer.encode_many([text], special_tokens=True)[0]
    assert len(ids) == 1 + len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>" + text


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "a/b/c"])
def test_missing_folder(path):
    with pytest.raises(UserError, match=f"critic.model.path={path}: no such folder"):
        load_tokenizer(path, key="critic.model.path")


def test_hub_name_that_cannot_be_had(monkeypatch, tmp_path):
    """Runs in its own process because huggingface_hub reads its environment when it is imported."""
    code = """
from ppo_ds.models.tokenizer import load_tokenizer
try:
    load_tokenizer("nobody/nothing")
except Exception as error:
    print(type(error).__name__, error)
"""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "UserError model.path=nobody/nothing: no folder of that name, not in the local Hub cache"
    )
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma"])
def test_a_model_folder_of_a_family_whose_tokenizer_is_made_of_nothing(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(
        UserError,
        match=f"^actor.model.path={tmp_path}: the tokenizer has no vocabulary; "
        "the folder needs tokenizer.json",
    ):
        load_tokenizer(str(tmp_path), key="actor.model.path")


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match="tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_broken_tokenizer_file(tmp_path):
    saved(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path))


def test_own_code_names_the_switch(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "c.C", "AutoTokenizer": ["t.T", null]}}'
    )
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["t.T", null]}, "tokenizer_class": "T"}'
    )
    with pytest.raises(
        UserError, match=r"^critic\.model\.path=.* set critic\.model\.trust_remote_code=true$"
    ):
        load_tokenizer(str(tmp_path), key="critic.model.path")


def test_revision_is_ignored_for_a_folder(tmp_path):
    assert load_tokenizer(saved(tmp_path), revision="no-such-branch").pad_id == 2
