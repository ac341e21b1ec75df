"""Tests that untrusted settings of a checkpoint or a dump neither run code nor read files elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from launch import export, replay
from ppo_ds.config.schema import PPOConfig, resolved
from ppo_ds.config.validation import validated
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.tools.settings import config_of_settings
from tests.integration.launching import ROOT, TIMEOUT, environment
from tests.tools.test_export import STEP, trained, write_base, write_checkpoint, write_run

SECRET = "the content of a private file"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def witness(tmp_path):
    """Returns the path of a file that malicious code would create; it must not exist when the test ends."""
    file = tmp_path / "witness"
    yield file
    assert not file.exists(), "planted code has run"


def error_of(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


# -- code ------------------------------------------------------------------------------------------


@pytest.fixture
def model_with_code(tmp_path, witness):
    """Writes a model folder whose config.json names Python code that creates the witness."""
    folder = tmp_path / "stranger"
    write_base(folder)
    (folder / "mine.py").write_text(
        f"open({str(witness)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForSequenceClassification\n"
        "class Config(LlamaConfig): pass\n"
        "class Model(LlamaForSequenceClassification): pass\n"
    )
    about = json.loads((folder / "config.json").read_text()) | {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForSequenceClassification": "mine.Model"},
    }
    (folder / "config.json").write_text(json.dumps(about))
    return {"path": str(folder), "trust_remote_code": True, "dtype": "fp32"}


def with_code(where, model):
    """Returns settings that trust the code of a model, from which a critic, reference or reward starts."""
    reward = {"_target_": "ppo_ds.rewards.model.model_reward", "model": model}
    rule = {"_target_": "ppo_ds.rewards.rules.LengthReward"}
    algo = {"advantage": {"estimator": "gae"}}
    return {
        "reward, critic from it": {"reward": reward, "critic": {"init": "reward"}, "algo": algo},
        "reward, critic auto": {"reward": reward, "critic": {"init": "auto"}, "algo": algo},
        "critic": {"critic": {"init": "path", "model": model}, "reward": rule, "algo": algo},
        "reference": {"reference": {"model": model}, "reward": rule},
        "part of a mixture": {
            "reward": {"_target_": "ppo_ds.rewards.weighted.WeightedReward", "parts": {"a": reward}}
        },
        "list in a reward": {"reward": rule | {"others": [{"model": model}]}},
    }[where]


PLACES = ["reward, critic from it", "reward, critic auto", "critic", "reference", "part of a mixture",
          "list in a reward"]  # fmt: skip


def write_dump(run, settings):
    """Writes a dump without weights, which replay would read only after it has built the models."""
    folder = run / "dumps" / "step_000001"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    row = {"row_of_the_rollout": 0, "prompt": "p"}
    (folder / "update.json").write_text(
        json.dumps(
            {"format": 1, "step": 1, "what": "loss", "rank": 0, "place": 0, "kl_coef": 0.0}
            | {"critic_only": False, "rows": [row]}
        )
    )
    save_file({}, folder / "update.safetensors")
    return folder


def settings_of(run, **sections):
    return {
        "run": {"dir": str(run)},
        "actor": {"model": {"path": f"{run}/start", "dtype": "bf16"}},
        "rollout": {"prompts_per_step": 4},
        "sampling": {"max_new_tokens": 4},
        "reward": {"_target_": "gone.with.the.machine"},
        **sections,
    }


@pytest.mark.parametrize("where", PLACES)
def test_a_dump_may_not_trust_code_for_the_user(tmp_path, model_with_code, capsys, monkeypatch, where):
    run = tmp_path / "run"
    write_base(run / "start")
    dump = write_dump(run, settings_of(run, **with_code(where, model_with_code)))
    # the columns of the dump do not matter
    monkeypatch.setattr("ppo_ds.tools.replay.read_dump", lambda folder: FakeDump)
    monkeypatch.setattr("ppo_ds.tools.replay.connect", connect)
    # building the actor needs ranks; the critic is built next
    monkeypatch.setattr("ppo_ds.tools.replay.build_actor", lambda *_: None)
    monkeypatch.setattr("ppo_ds.tools.replay.load_model", lambda *_: None)
    assert replay.main([str(dump)]) == 2
    (line,) = error_of(capsys)
    assert ".trust_remote_code=true runs Python code" in line and "--trust-remote-code" in line


class FakeDump:
    class minibatch:
        ids = torch.ones(1, 2)


def connect(minutes):
    class World:
        device, rank, size = torch.device("cpu"), 0, 1

    return World


@pytest.mark.parametrize("where", PLACES)
def test_a_checkpoint_may_not_trust_code_for_the_user(tmp_path, model_with_code, capsys, where):
    run = tmp_path / "run"
    write_base(run / "start")
    settings = settings_of(run, **with_code(where, model_with_code))
    write_checkpoint(run / STEP, trained(run / "start"), settings)
    assert export.main([str(run)]) == 2
    (line,) = error_of(capsys)
    assert ".trust_remote_code=true runs Python code" in line and "--trust-remote-code" in line


def test_targets_of_settings_are_not_imported(tmp_path, witness, monkeypatch):
    (tmp_path / "planted.py").write_text(f"open({str(witness)!r}, 'w').close()\ndef f(**_): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"
    write_base(run / "start")
    target = {"_target_": "planted.f", "path": f"{tmp_path}/planted.py:f"}
    write_checkpoint(run / STEP, trained(run / "start"), settings_of(run, reward=target, prepare=target))
    assert export.main([str(run)]) == 0


def test_kernels_of_the_hub_need_trust(tmp_path, witness):
    """The package ``kernels``, which would load and run the code, is a stub here."""
    stub = tmp_path / "stub"
    (stub / "kernels").mkdir(parents=True)
    info = stub / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    (stub / "kernels" / "__init__.py").write_text(
        "class Names(type):\n"
        "    def __getattr__(cls, name):\n"
        "        if name.startswith('__'): raise AttributeError(name)\n"
        "        return 1\n"
        "class Anything(metaclass=Names):\n"
        "    def __init__(self, *a, **k): pass\n"
        "    def __call__(self, *a, **k): return a[0] if a else None\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *a): pass\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'): raise AttributeError(name)\n"
        "    return Anything\n"
        "def get_kernel(name, **k):\n"
        "    if name != 'kernels-community/quantization-bitsandbytes':\n"  # which bitsandbytes itself loads
        f"        open({str(witness)!r}, 'w').close()\n"
        "    raise OSError('stub')\n"
    )
    run = write_run(tmp_path / "run", attn_implementation="nobody/attention")
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "export.py"), str(run)],
        env=environment(PYTHONPATH=str(stub)), capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "actor.model.attn_implementation=nobody/attention: must be one of sdpa, eager, " in line


# -- files -----------------------------------------------------------------------------------------


def test_a_chat_template_of_a_checkpoint_is_not_a_file_of_this_machine(tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    run = tmp_path / "run"
    write_base(run / "start")
    settings = settings_of(run, data={"chat_template": str(secret)})
    write_checkpoint(run / STEP, trained(run / "start"), settings)
    assert export.main([str(run)]) == 2
    (line,) = error_of(capsys)
    assert f"data.chat_template={secret}: names a file" in line and "replace the path" in line
    assert not (run / "exports").exists()


def test_a_chat_template_of_a_checkpoint_may_be_text(tmp_path):
    run = tmp_path / "run"
    write_base(run / "start")
    settings = settings_of(run, data={"chat_template": TEMPLATE})
    write_checkpoint(run / STEP, trained(run / "start"), settings)
    assert export.main([str(run)]) == 0
    assert load_tokenizer(str(run / "exports" / "step_000002" / "model")).hf.chat_template == TEMPLATE


def test_a_replay_does_not_read_the_chat_template(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    write_base(run / "start")
    read = []
    monkeypatch.setattr("ppo_ds.tools.replay.build_tokenizer", lambda config: read.append(config) or stop())
    dump = write_dump(run, settings_of(run, data={"chat_template": "/etc/hostname"}))
    monkeypatch.setattr("ppo_ds.tools.replay.read_dump", lambda folder: FakeDump)
    monkeypatch.setattr("ppo_ds.tools.replay.connect", connect)
    assert replay.main([str(dump)]) == 2
    assert read[0].data.chat_template is None


def stop():
    raise UserError("stop")


def tree(chat_template):
    return {
        "run": {"steps": 1, "name": "a"},
        "actor": {"model": {"path": "a/b"}},
        "data": {"path": "x/y", "chat_template": chat_template},
        "rollout": {"prompts_per_step": 1},
        "sampling": {"max_new_tokens": 1},
        "reward": {"_target_": "ppo_ds.rewards.function.FunctionReward", "path": "math:fsum"},
    }


def test_a_run_and_its_checkpoints_hold_the_text(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    assert resolved(validated(tree(str(file)), 1))["data"]["chat_template"] == TEMPLATE
    assert resolved(validated(tree(TEMPLATE), 1))["data"]["chat_template"] == TEMPLATE


@pytest.mark.parametrize("name", ["actor/buffers.safetensors", "new.json", "actor/more"])
def test_a_checkpoint_with_a_link_to_a_file_elsewhere_is_refused(tmp_path, capsys, name):
    run = write_run(tmp_path / "run")
    outside = tmp_path / "outside.safetensors"
    save_file({}, outside)
    (run / STEP / name).unlink(missing_ok=True)
    (run / STEP / name).symlink_to(outside)
    assert export.main([str(run)]) == 2
    (line,) = error_of(capsys)
    assert f"{name} is a symbolic link to a file elsewhere" in line


def test_a_dump_with_a_link_to_a_file_elsewhere_is_refused(tmp_path, capsys):
    dump = write_dump(tmp_path / "run", settings_of(tmp_path / "run"))
    (dump / "actor").symlink_to(tmp_path)
    assert replay.main([str(dump)]) == 2
    assert "actor is a symbolic link to a file elsewhere" in error_of(capsys)[0]


LOOP: dict[str, object] = {}
LOOP["run"] = LOOP


@pytest.mark.parametrize("settings", [{5: {6: 7}}, {"run": {None: 1}}, {"run": [{1: 2}]}, LOOP])
def test_settings_with_loops_or_keys_that_are_no_text_end_with_one_line(settings):
    tree = yaml.safe_load(yaml.safe_dump(settings))
    with pytest.raises(UserError, match="^config.yaml: holds no settings, which are nested mappings"):
        config_of_settings(tree, Path("config.yaml"), trust_remote_code=False, kind=PPOConfig)


@pytest.mark.parametrize("settings", [[], "x", {"run": 3}, {"run": {}}, {"actor": []}, None])
def test_settings_that_are_no_config_end_with_lines(tmp_path, capsys, settings):
    run = tmp_path / "run"
    write_base(run / "start")
    write_checkpoint(run / STEP, trained(run / "start"), settings)
    assert export.main([str(run)]) == 2
    dump = write_dump(run, settings)
    assert replay.main([str(dump)]) == 2
    assert len(error_of(capsys)) >= 2
