"""Tests untrusted model folders: links, chat templates that are too expensive, attention kernels."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time

import pytest
from safetensors.torch import load_file

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models import tokenizer as tokenizer_module
from ppo_ds.models.loading import ATTENTION, attention, load_config
from ppo_ds.models.policy import load_policy
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.storage.reading import entries_from_elsewhere
from tests.tools.test_export import write_base

CHAT = [{"role": "user", "content": "hi"}]
KEY = "actor.model.path"


@pytest.fixture
def folder(tmp_path):
    write_base(tmp_path / "model")
    return tmp_path / "model"


# -- links -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.txt", "additional_chat_templates/a.jinja"])
def test_a_link_out_of_a_model_folder_is_refused(tmp_path, folder, name, absolute):
    (tmp_path / "secret").write_text("private")
    (folder / name).parent.mkdir(exist_ok=True)
    target = tmp_path / "secret"
    (folder / name).symlink_to(target if absolute else os.path.relpath(target, (folder / name).parent))
    for load in (
        lambda: load_tokenizer(str(folder), key=KEY),
        lambda: load_config(str(folder), key=KEY),
        lambda: load_policy(ModelConfig(path=str(folder)), temperature=1.0, key=KEY),
    ):
        with pytest.raises(UserError) as caught:
            load()
        line = f"{KEY}={folder}: {name} is a symbolic link to a file elsewhere; replace the link"
        assert str(caught.value) == line


@pytest.mark.parametrize(
    ("file", "entry"),
    [
        ("config.json", "configuration_files"),
        ("tokenizer_config.json", "fast_tokenizer_files"),
        ("model.safetensors.index.json", "weight_map"),
    ],
)
@pytest.mark.parametrize("absolute", [True, False])
def test_a_name_of_a_file_outside_of_a_model_folder_is_refused(tmp_path, folder, file, entry, absolute):
    """transformers would read the file: weights, a config or a tokenizer of another folder."""
    name = f"{tmp_path}/private/x.json" if absolute else "sub/../../private/x.json"
    about = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    names = {"a.weight": name, "b.weight": "here"} if entry == "weight_map" else ["here.json", name]
    (folder / file).write_text(json.dumps(about | {entry: names}))
    for load in (
        lambda: load_tokenizer(str(folder), key=KEY),
        lambda: load_policy(ModelConfig(path=str(folder)), temperature=1.0, key=KEY),
    ):
        with pytest.raises(UserError) as caught:
            load()
        assert f"{entry} in its {file} names a file outside of the folder ({name})" in str(caught.value)


@pytest.mark.parametrize("absolute", [True, False])
def test_an_index_in_a_folder_below_cannot_name_weights_outside(tmp_path, folder, absolute):
    """config.json selects the index; transformers joins its names to the path of the model's folder."""
    shutil.copytree(folder, tmp_path / "private")
    shard = f"{tmp_path}/private/model.safetensors" if absolute else "../private/model.safetensors"
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "a" / "b").mkdir(parents=True)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / "a" / "b" / "x.safetensors.index.json").write_text(json.dumps(index))
    about = json.loads((folder / "config.json").read_text())
    chosen = {"transformers_weights": "a/b/x.safetensors.index.json"}
    (folder / "config.json").write_text(json.dumps(about | chosen))
    with pytest.raises(UserError, match="weight_map in its a/b/x.safetensors.index.json names a file"):
        load_policy(ModelConfig(path=str(folder)), temperature=1.0, key=KEY)


@pytest.mark.parametrize("weight_map", [None, 5, {"a": 5}, {"a": None}, {"a": ["x"]}])
def test_an_index_with_values_of_other_types_ends_with_one_line(folder, weight_map):
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"^{KEY}={folder}: "):
        load_policy(ModelConfig(path=str(folder)), temperature=1.0, key=KEY)


def test_a_link_to_a_folder_or_through_another_link_is_refused(tmp_path, folder):
    (tmp_path / "other").mkdir()
    (folder / "b").symlink_to(tmp_path / "other")
    (folder / "a").symlink_to("b")
    (folder / "loop").symlink_to("loop")
    (folder / "gone").symlink_to("nowhere")
    assert [line.split()[0] for line in entries_from_elsewhere(folder)] == ["a", "b"]


def hub_cache(root, folder):
    """Moves a model folder to where the Hub's cache would keep it."""
    cache = root / "hub" / "models--someone--model"
    snapshot = cache / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(cache / "blobs" / f"{i:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040x}")
    return snapshot


def test_links_of_the_hubs_cache_are_followed(tmp_path, folder):
    snapshot = hub_cache(tmp_path, folder)
    assert load_tokenizer(str(snapshot)).vocab_size > 0
    (tmp_path / "cache").symlink_to(tmp_path / "hub")  # the cache may be on another disk
    moved = tmp_path / "cache" / "models--someone--model" / "snapshots" / snapshot.name
    assert load_tokenizer(str(moved)).vocab_size > 0


def test_the_hubs_layout_does_not_allow_other_links(tmp_path, folder):
    snapshot = hub_cache(tmp_path, folder)
    (tmp_path / "secret").write_text("private")
    blobs = snapshot.parent.parent / "blobs"
    (blobs / "secret").symlink_to(tmp_path / "secret")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/secret")
    (line,) = entries_from_elsewhere(snapshot)
    assert line.startswith("chat_template.jinja is a symbolic link")
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    assert len(list(entries_from_elsewhere(snapshot))) > 3


# -- chat templates --------------------------------------------------------------------------------

SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'a' * 20000000 }}", "renders 20000000 characters, more than 10000000"),
        ("{{ 'a' * 4000000000 }}", "MemoryError"),
        ("{{ '%4000000000d' % 1 }}", "MemoryError"),
        (DOUBLED, "MemoryError"),
        (SLOW, "TimeoutError: took more than"),
    ],
)
def test_a_template_is_limited_in_length_memory_and_time(folder, monkeypatch, template, words):
    monkeypatch.setattr(tokenizer_module, "SECONDS", 2.0)
    monkeypatch.setattr(tokenizer_module, "BYTES", 2**28)
    tokenizer, start = load_tokenizer(str(folder), chat_template=template + "{{ '' }}"), time.monotonic()
    with pytest.raises(UserError) as caught:
        tokenizer.render_chat(CHAT)
    assert words in str(caught.value) and time.monotonic() - start < 30
    assert len(bytearray(2**29)) == 2**29  # the memory limit no longer applies


def test_a_usual_template_is_rendered_in_any_thread(folder):
    tokenizer = load_tokenizer(str(folder), chat_template="{{ messages[0]['content'] }}!")
    rendered = []
    for call in (lambda work: work(), lambda work: in_thread(work)):
        call(lambda: rendered.append(tokenizer.render_chat(CHAT)))
    assert rendered == ["hi!", "hi!"]


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# -- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["nobody/attention", "nobody/attention@v1:forward", "paged|nobody/x", "spda"]
)
def test_attention_from_the_hub_needs_trust(folder, name):
    section = ModelConfig(path=str(folder), attn_implementation=name)
    with pytest.raises(
        UserError, match=r"^actor.model.attn_implementation=.*actor.model.trust_remote_code=true$"
    ):
        attention(section, KEY)
    trusted = ModelConfig(path=str(folder), attn_implementation=name, trust_remote_code=True)
    assert attention(trusted, KEY) == name


def test_attention_of_transformers_is_allowed(folder):
    chosen = [attention(ModelConfig(path="a/b", attn_implementation=name), KEY) for name in ATTENTION]
    assert chosen == [None, *ATTENTION[1:]]
