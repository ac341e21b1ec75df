import json

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DistilBertConfig,
    Gemma3Config,
    LlamaConfig,
    MptConfig,
    OPTConfig,
    dynamic_module_utils,
)

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.loading import from_pretrained, load_config, refuse_missing, torch_dtype

TINY = dict(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


@pytest.fixture
def folder(tmp_path):
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    return tmp_path


def from_folder(folder, **changes):
    section = ModelConfig(path=str(folder), **{"dtype": "fp32"} | changes)
    return from_pretrained(AutoModelForCausalLM, section, config=load_config(str(folder)))


def load(folder, **changes):
    model, info = from_folder(folder, **changes)
    refuse_missing(str(folder), info)
    return model


def refused(folder, *words):
    with pytest.raises(UserError) as caught:
        load(folder)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"model.path={folder}: ")
    for word in words:
        assert word in str(caught.value)


def test_dtypes(folder):
    assert [torch_dtype(name) for name in ("bf16", "fp16", "fp32")] == [
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]
    with pytest.raises(UserError, match="int8"):
        torch_dtype("int8")
    model, _ = from_folder(folder, dtype="bf16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (
            OPTConfig(dropout=0.1, attention_dropout=0.2, layerdrop=0.3),
            ["dropout", "attention_dropout", "layerdrop"],
        ),
        (DistilBertConfig(dropout=0.1, seq_classif_dropout=0.2), ["dropout", "seq_classif_dropout"]),
        (MptConfig(resid_pdrop=1, emb_pdrop=0.2), ["resid_pdrop", "emb_pdrop"]),
    ],
)
def test_every_dropout_is_zero(tmp_path, config, names):
    config.save_pretrained(tmp_path)
    loaded = load_config(str(tmp_path))
    assert [getattr(loaded, name) for name in names] == [0.0] * len(names)


def test_dropout_of_nested_configs_is_zero_and_the_rest_is_untouched(tmp_path):
    Gemma3Config(text_config={"attention_dropout": 0.5, "rms_norm_eps": 0.25}).save_pretrained(tmp_path)
    text = load_config(str(tmp_path)).text_config
    assert (text.attention_dropout, text.rms_norm_eps) == (0, 0.25)


def test_a_revision_means_nothing_to_a_folder(folder):
    plain = load_config(str(folder)).to_dict()
    assert load_config(str(folder), revision="no-such-branch").to_dict() == plain
    expected, found = load(folder).state_dict(), load(folder, revision="no-such-branch").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "~/nowhere/at/all", "nowhere", "a/b/c"])
def test_missing_folder(path):
    with pytest.raises(UserError, match=r"^actor.model.path=\S+: no such folder.*owner/name"):
        load_config(path, key="actor.model.path")


def test_a_file_is_no_folder(folder):
    refused(folder / "model.safetensors", "is a file", "give the folder")


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="^model.path=nobody/nothing: .*Hub cannot be reached.*local folder"):
        load_config("nobody/nothing")


def test_remote_code_needs_consent(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}})
    )
    with pytest.raises(UserError, match="actor.model.trust_remote_code=true"):
        load_config(str(tmp_path), key="actor.model.path")


def test_broken_config(folder):
    (folder / "config.json").write_text("{")
    refused(folder, "not a valid JSON")


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": "x"}, {"num_attention_heads": 3}, {"num_attention_heads": 0}, {"vocab_size": None},
     {"pad_token_id": 999},
     {"hidden_act": "nope"}, {"rope_scaling": {"rope_type": "nope"}}, {"model_type": "nope"}],
    ids=str,
)  # fmt: skip
def test_config_that_makes_no_sense(folder, change):
    """Any exception caused by the folder's config becomes an error about the folder.

    The causes include validators of the Hub, assertions of torch and lookups of transformers.
    """
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(folder)


def test_folder_without_a_model(tmp_path):
    refused(tmp_path, "model_type")


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "no file named model.safetensors")


def test_cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(folder, "damaged", "incomplete")


def test_other_architecture(tmp_path):
    DistilBertConfig().save_pretrained(tmp_path)
    refused(tmp_path, "Unrecognized configuration class")


def test_unknown_attention(folder):
    with pytest.raises(UserError, match="attn_implementation"):
        load(folder, attn_implementation="spda")


def test_no_weight_starts_at_random(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, "model.norm.weight", "at random")
    _, info = from_folder(folder)
    refuse_missing(str(folder), info, allowed=["model.norm.weight"])


def test_no_weight_of_another_shape(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(9)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, "model.norm.weight is [9], not [8]")


OWN_CONFIG = """
from transformers import PreTrainedConfig


class Own(PreTrainedConfig):
    model_type = "own_config"

    def __init__(self, rope_theta=100.0, {argument}=None, **kwargs):
        self.rope_theta = rope_theta
        self.{argument} = {argument}
        super().__init__(**kwargs)
"""


@pytest.mark.parametrize(
    ("argument", "given", "loaded"),
    [
        # code for transformers 4: None stays None, and a scaling keeps its type
        ("rope_scaling", None, None),
        (
            "rope_scaling",
            {"type": "dynamic", "factor": 2.0},
            {"type": "dynamic", "factor": 2.0, "rope_type": "dynamic", "rope_theta": 100.0},
        ),
        # code for transformers 5
        ("rope_parameters", None, {"rope_type": "default", "rope_theta": 100.0}),
    ],
)
def test_rope_of_a_config_class_of_the_models_own_code(tmp_path, monkeypatch, argument, given, loaded):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(OWN_CONFIG.format(argument=argument))
    settings = {"model_type": "own_config", "auto_map": {"AutoConfig": "own.Own"}, argument: given}
    (folder / "config.json").write_text(json.dumps(settings))
    config = load_config(str(folder), trust_remote_code=True)
    assert config.rope_scaling == loaded
