"""Tests that inputs of a run cannot execute code, access files elsewhere, or leak keys into written files.

Each malicious file would create a witness file if its code ran. A test proves that ``CODE`` and ``Planted``
do so, because otherwise a missing witness would mean nothing.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from launch.cli import load_config
from ppo_ds.config.sections.models import FrozenZeroConfig, ModelConfig
from ppo_ds.data.rows import load_rows
from ppo_ds.engine.checkpoint.checkpoints import damage_of
from ppo_ds.engine.checkpoint.files import sha256
from ppo_ds.engine.checkpoint.reading import read_weights
from ppo_ds.engine.checkpoint.shards import read_index
from ppo_ds.engine.rng import load_rng
from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from ppo_ds.models.chat_scorer import load_chat_scorer
from ppo_ds.models.policy import load_policy
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.models.value import can_start_critic, load_critic, load_reward_model
from ppo_ds.run.record import open_run_directory
from ppo_ds.secrets import censored

ROOT = Path(__file__).parent.parent


def section(path):
    return ModelConfig(path=path, dtype="fp32")


MODELS = {
    "actor": lambda path: load_policy(section(path), temperature=1.0, key="actor.model.path"),
    "critic": lambda path: load_critic(section(path), zero_head=True, key="critic.model.path"),
    "reward": lambda path: load_reward_model(section(path), key="reward.model.path"),
}


@pytest.fixture(autouse=True)
def witness(tmp_path):
    """Returns the path of a file that malicious code would create; it must not exist when the test ends."""
    file = tmp_path / "witness"
    yield file
    assert not file.exists(), "planted code has run"


class Planted:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


@pytest.fixture
def code(witness):
    """Writes Python code into a model folder, with all classes that a config may name."""
    return (
        f"open({str(witness)!r}, 'w').close()\n"
        "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast "
        "as Tok\n"
        "def generate(model, **kwargs): pass\n"
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Writes a tiny language model without code."""
    folder = tmp_path_factory.mktemp("sound")
    tokenizer = tiny.character_tokenizer("ab")
    tiny.save(tiny.tiny_llama(tokenizer, hidden_size=8, layers=1, heads=2, max_tokens=8), tokenizer, folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def line_of(caught: pytest.ExceptionInfo) -> str:
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


# -- code in input files ---------------------------------------------------------------------------


def test_the_planted_code_runs_if_it_is_loaded(witness, code):
    for run in (lambda: pickle.loads(pickle.dumps(Planted(witness))).close(), lambda: exec(code, {})):
        run()
        assert witness.exists()
        witness.unlink()


@pytest.mark.parametrize("role", MODELS)
@pytest.mark.parametrize("how", ["pytorch_model.bin", "raw", "shard.bin"])
def test_weights_that_are_pickles_with_code(folder, witness, role, how):
    (folder / "model.safetensors").unlink()
    if how == "raw":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Planted(witness)))
    else:
        torch.save({"lm_head.weight": Planted(witness)}, folder / how)
    if how == "shard.bin":
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": how}})
        )
    with pytest.raises(UserError) as caught:
        MODELS[role](str(folder))
    line, file = line_of(caught), "pytorch_model.bin" if how == "raw" else how
    assert line.startswith(f"{role}.model.path={folder}: {file} is damaged, or holds more than tensors")
    assert ".safetensors" in line


def test_pickles_of_tensors_alone_are_read(folder):
    lm = MODELS["actor"](str(folder)).lm
    torch.save(lm.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(MODELS["actor"](str(folder)).lm.lm_head.weight, lm.lm_head.weight)


def test_unneeded_pickles_are_not_read(folder, witness):
    """A model folder may also contain pickles of optimizer states, training arguments and adapters."""
    for (
        name
    ) in "training_args.bin optimizer.pt scheduler.pt tokenizer.pkl adapter_model.bin value_head.bin".split():
        torch.save({"x": Planted(witness)}, folder / name)
    for load in (MODELS["actor"], MODELS["critic"], load_tokenizer):
        load(str(folder))
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(folder),
        "r": 1,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="adapter_model"):
        MODELS["actor"](str(folder))


def planted_code(folder: Path, code: str, where: str) -> None:
    (folder / "mine.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    if where == "tokenizer":
        changed(
            folder / "tokenizer_config.json",
            tokenizer_class="Mine",
            auto_map={"AutoTokenizer": ["mine.Tok", "mine.Tok"]},
        )
    else:
        mapped = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
        changed(
            folder / "config.json",
            auto_map={name: "mine.Config" if name == "AutoConfig" else "mine.Model" for name in mapped},
        )
    if where == "model of its own":
        changed(folder / "config.json", model_type="mine", architectures=["Mine"])


@pytest.mark.parametrize("role", MODELS)
def test_a_model_with_its_own_code_names_the_key(folder, code, role):
    planted_code(folder, code, "model of its own")
    with pytest.raises(UserError) as caught:
        MODELS[role](str(folder))
    line = (
        f"{role}.model.path={folder}: needs Python code from its own files; read that "
        f"code, then set {role}.model.trust_remote_code=true"
    )
    assert line_of(caught) == line


def test_no_other_reader_runs_the_code(folder, code, sound):
    planted_code(folder, code, "tokenizer")
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(folder), key="actor.model.path")
    assert line_of(caught).endswith("actor.model.trust_remote_code=true") and "own code" in line_of(caught)
    with pytest.raises(UserError, match="reward.model.trust_remote_code=true"):
        load_chat_scorer(section(str(folder)), key="reward.model")
    with pytest.raises(UserError, match="reward.model.trust_remote_code=true"):
        can_start_critic(section(str(folder)), load_tokenizer(str(sound)))


def test_code_of_a_folder_with_a_known_architecture_is_not_run(folder, code, witness):
    """transformers implements the architecture, so the folder's implementation is not used."""
    planted_code(folder, code, "known model")
    for load in MODELS["actor"], MODELS["critic"], load_tokenizer:
        load(str(folder))
        assert not witness.exists()


def test_a_folder_does_not_choose_kernels_from_the_hub(folder, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.load_and_register_attn_kernel",
        lambda *given, **_: loaded.append(given),
    )
    changed(folder / "config.json", attn_implementation="nobody/attention")
    MODELS["actor"](str(folder))
    can_start_critic(section(str(folder)), load_tokenizer(str(folder)))
    assert loaded == []


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch WITNESS') }}{% set x.y = 1 %}",
    ],
)
def test_chat_templates_run_in_a_sandbox(folder, witness, template):
    tokenizer = load_tokenizer(
        str(folder), chat_template=template.replace("WITNESS", str(witness)), key="actor.model.path"
    )
    with pytest.raises(UserError, match="chat template"):
        tokenizer.render_chat([{"role": "user", "content": "a"}])


def test_trust_in_one_model_is_not_trust_in_another():
    given = ["actor.model.path=a/b", "actor.model.trust_remote_code=true"]
    others = ["critic.init=path", "critic.model.path=c/d", "reference.model.path=e/f"]
    more = "data.path=x/y reward=function reward.path=math:fsum rollout.prompts_per_step=1".split()
    more += ["sampling.max_new_tokens=1", "run.steps=1"]
    config = load_config([*given, *others, *more], world_size=1)
    assert config.actor.model.trust_remote_code
    assert not config.critic.model.trust_remote_code
    assert not config.reference.model.trust_remote_code
    assert ModelConfig(path="x").trust_remote_code is False and not FrozenZeroConfig().offload_params
    config = load_config([*given, *more], world_size=1)
    assert config.reference.model.trust_remote_code  # the reference is the actor's model


def test_data_sets_are_never_programs(tmp_path, witness, code):
    script = tmp_path / "mine"
    script.mkdir()
    (script / "mine.py").write_text(code)
    for name in ("rows.pkl", "rows.arrow", "rows.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Planted(witness)))
        with pytest.raises(UserError, match="the name of a data file must end in one of"):
            load_rows(str(tmp_path / name))
    with pytest.raises(UserError, match="no .jsonl, .json, .parquet, .csv file in this folder"):
        load_rows(str(script))
    told = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Planted(witness)),
    }
    schema = pyarrow.schema([pyarrow.field("prompt", pyarrow.string(), metadata=told)])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}, schema=schema), tmp_path / "rows.parquet")
    assert list(load_rows(str(tmp_path / "rows.parquet"))) == [{"prompt": "a"}]


# -- untrusted checkpoints -------------------------------------------------------------------------


def listed(folder: Path, **others: Any) -> None:
    """Writes a manifest that matches the malicious files."""
    (folder / "manifest.json").unlink(missing_ok=True)
    files = {
        str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": sha256(f)}
        for f in folder.rglob("*")
        if f.is_file()
    }
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": files | others}))


@pytest.fixture
def checkpoint(tmp_path):
    """Writes the checkpoint of a minimal model with one weight and no buffers."""
    folder = tmp_path / "checkpoints" / "step_000001"
    (folder / "actor").mkdir(parents=True)
    about = {"format": 1, "dtype": "float32", "shards": {"weight": "shard-00000.safetensors"}}
    (folder / "actor" / "model.json").write_text(json.dumps(about))
    save_file({"weight/weight": torch.ones(2, 3)}, folder / "actor" / "shard-00000.safetensors")
    save_file({}, folder / "actor" / "buffers.safetensors")
    (folder / "state.json").write_text("{}")
    listed(folder)
    return folder


def test_a_valid_checkpoint_is_read(checkpoint):
    module = torch.nn.Linear(3, 2, bias=False)
    assert damage_of(checkpoint) == []
    read_weights(module, checkpoint, "actor")
    assert torch.equal(module.weight, torch.ones(2, 3))


@pytest.mark.parametrize("name", ["../../outside", "actor/../../../outside", "/etc/passwd", "a\0b", ".."])
def test_a_manifest_that_names_files_elsewhere(checkpoint, name):
    (checkpoint.parents[1] / "outside").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    listed(checkpoint, **{name: {"bytes": 0, "sha256": empty}})
    (problem,) = damage_of(checkpoint)
    assert problem.startswith("manifest.json names ")
    assert problem.endswith("which is not a file of the checkpoint")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        '{"files": 3}',
        '{"files": {"a": 7}}',
        '{"files": {"a": {}}}',
        '{"files": ["a"]}',
        '{"files": {"a": ' + "9" * 5000 + "}}",
        "\xff",
    ],
)
def test_an_invalid_manifest(checkpoint, text):
    (checkpoint / "manifest.json").write_text(text, encoding="latin-1")
    assert damage_of(checkpoint) == ["manifest.json is missing or unreadable"]


def test_absurd_sizes(checkpoint):
    listed(checkpoint, **{"actor/model.json": {"bytes": 10**400, "sha256": "x"}})
    assert damage_of(checkpoint)[0].startswith("actor/model.json has ")
    shard = checkpoint / "actor" / "shard-00000.safetensors"
    for header in (
        b"\xff" * 8,
        (2**40).to_bytes(8, "little") + b"{}",
        _header(shape=[2**40, 2**40]),
        _header(data_offsets=[0, 2**60]),
    ):
        shard.write_bytes(header)
        with pytest.raises(Exception, match="(?i)header|tensor|overflow|offset|size"):
            read_weights(torch.nn.Linear(3, 2, bias=False), checkpoint, "actor")


def _header(**changes: Any) -> bytes:
    text = json.dumps(
        {"weight/weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}
    ).encode()
    return len(text).to_bytes(8, "little") + text + bytes(24)


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/OUTSIDE", 7, None])
def test_an_index_that_names_files_elsewhere(checkpoint, name):
    outside = checkpoint.parents[1] / "outside.safetensors"
    save_file({"weight/weight": torch.ones(2, 3)}, outside)
    name = str(outside) if name == "/OUTSIDE" else name
    changed(checkpoint / "actor" / "model.json", shards={"weight": name})
    listed(checkpoint)
    assert damage_of(checkpoint) == []
    for read in (
        lambda: read_weights(torch.nn.Linear(3, 2, bias=False), checkpoint, "actor"),  # called by exports
        lambda: read_index(checkpoint / "actor" / "model.json", ["weight"]),  # called by runs
    ):
        with pytest.raises(UserError) as caught:
            read()
        assert "model.json: names " in line_of(caught) and "no file of that folder" in line_of(caught)


def test_pickles_in_a_checkpoint_are_not_read(checkpoint, witness):
    class World:
        rank = 0

    for name in (
        "actor/shard-00000.safetensors",
        "actor/buffers.safetensors",
        "rng_rank_00000.safetensors",
        "mp_rank_00_model_states.pt",
    ):
        torch.save({"weight/weight": Planted(witness)}, checkpoint / name)
    listed(checkpoint)
    assert damage_of(checkpoint) == []  # an attacker can write a matching manifest
    with pytest.raises(Exception, match="(?i)header"):
        read_weights(torch.nn.Linear(3, 2, bias=False), checkpoint, "actor")
    with pytest.raises(Exception, match="(?i)header"):
        load_rng(checkpoint, World)


# -- sources of code -------------------------------------------------------------------------------

# Lists everything that can run foreign code or unpickle, with the reason why it may.
ALLOWED = {
    ("ppo_ds/models/loading.py", "pickle"): "the exception of torch.load(weights_only=True), to tell it",
    ("ppo_ds/distributed/world.py", "all_gather_object"): "between the ranks of one run",
    ("ppo_ds/distributed/subgroup.py", "all_gather_object"): "between the ranks of one run",
    ("ppo_ds/__init__.py", "import_module"): "launch/python.py",
    ("ppo_ds/config/registry.py", "import_module"): "the tables' own targets, or a name of the command line",
    ("ppo_ds/commands/entry_points.py", "runpy"): "starts a command of this package",
    ("ppo_ds/background/user_code.py", "import_module"): "the user's own reward or environment",
    ("ppo_ds/background/user_code.py", "spec_from_file_location"): "the same",
    ("ppo_ds/background/user_code.py", "exec_module"): "the same",
    ("ppo_ds/rewards/processes.py", "subprocess"): "its worker processes: a list of arguments, no shell",
    ("ppo_ds/rewards/processes.py", "multiprocessing"): "sends calls to them; their replies are read as JSON",
    ("ppo_ds/data/reasoning_gym.py", "subprocess"): "runs itself: a list of arguments, no shell",
    ("ppo_ds/data/reasoning_gym.py", "pickle"): "the rows that this process has made",
    ("ppo_ds/rewards/worker.py", "multiprocessing"): "unpickles calls, which the rank has sent",
    (
        "ppo_ds/distributed/child_groups.py",
        "subprocess",
    ): "a pipeline's stages: a list of arguments, no shell",
    ("ppo_ds/distributed/gpus.py", "subprocess"): "nvidia-smi, with a fixed list of arguments",
}
# files that pass on the permission to run a model's code, and what they pass
TRUST = {
    # the command's own option, over the config of a checkpoint or a dump
    "launch/export.py": ["options.trust_remote_code"],
    "launch/replay.py": ["options.trust_remote_code"],
    "ppo_ds/tools/export.py": ["trust_remote_code"],
    "ppo_ds/tools/replay.py": ["trust_remote_code"],
    # the permission of the same model
    "ppo_ds/assemble/dry_run.py": ["bool(model.get('trust_remote_code'))"],
    "ppo_ds/models/loading.py": ["model.trust_remote_code", "trust_remote_code"],
    "ppo_ds/models/size.py": ["section.trust_remote_code"],
    "ppo_ds/models/tiny.py": ["trust_remote_code"],
    "ppo_ds/models/tokenizer.py": ["trust_remote_code"],
    "ppo_ds/models/value.py": ["section.trust_remote_code"],
}
MODULES = set("pickle marshal shelve dill cloudpickle joblib subprocess runpy multiprocessing".split())
MODULES |= {"code", "pty", "imp", "pkgutil"}
ATTRIBUTES = set(
    """
    torch.load numpy.load np.load yaml.load yaml.full_load yaml.unsafe_load yaml.load_all pandas.read_pickle
    os.system os.popen os.execv os.execve os.execvp os.spawnv os.spawnvp os.posix_spawn os.fork
    import_module exec_module spec_from_file_location all_gather_object broadcast_object_list gather_object
    scatter_object_list add_safe_globals load_from_disk read_pickle load_checkpoint
    """.split()
)
TAILS = {name.rpartition(".")[2] for name in ATTRIBUTES}
CALLS = {"eval", "exec", "compile", "__import__"}
# Arguments that permit code, with their only harmless value. Any other value must be in ALLOWED.
SWITCHES = {
    "trust_remote_code": False,
    "weights_only": True,
    "allow_pickle": False,
    "shell": False,
    "allow_all_kernels": False,
}


def dangers(source: str) -> set[str]:
    """Returns the names of the dangerous functions that a source uses."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES | {
                alias.name for alias in node.names
            } & ATTRIBUTES
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & ATTRIBUTES
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in SWITCHES:
            found.add(f"{ast.unparse(node)} = ...")
        elif isinstance(node, ast.Attribute) and node.attr in TAILS:
            found |= {node.attr, ast.unparse(node)} & ATTRIBUTES
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found |= {node.id} & CALLS
        elif isinstance(node, ast.keyword) and node.arg in SWITCHES:
            if not (isinstance(node.value, ast.Constant) and node.value.value is SWITCHES[node.arg]):
                found.add(f"{node.arg}={ast.unparse(node.value)}")
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in SWITCHES:
                    if not (isinstance(value, ast.Constant) and value.value is SWITCHES[key.value]):
                        found.add(f"{key.value}={ast.unparse(value)}")
    return found


def test_every_use_of_code_execution_is_listed():
    files = [file for folder in ("ppo_ds", "launch") for file in (ROOT / folder).rglob("*.py")]
    found = {(str(file.relative_to(ROOT)), danger) for file in files for danger in dangers(file.read_text())}
    trust = {(file, f"trust_remote_code={value}") for file, values in TRUST.items() for value in values}
    assert found == set(ALLOWED) | trust


# -- keys ------------------------------------------------------------------------------------------

SECRET = "sk-notArealKeyButLong+/0123"


@pytest.fixture
def keys(monkeypatch):
    for name, value in {
        "JUDGE_KEY": SECRET,
        "HF_TOKEN": "hf_ofNobodyAtAllButLong",
        "WANDB_API_KEY": "0123456789" * 4,
    }.items():
        monkeypatch.setenv(name, value)


RUN = ["data.path=x/y", "actor.model.path=a/b", "rollout.prompts_per_step=1"]
RUN += ["sampling.max_new_tokens=1", "run.steps=1"]
BY_FUNCTION = ["reward=function", "reward.path=math:fsum"]
REMOTE = ["reward=remote", "reward.url=https://host/x"]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["reward=remote", "reward.url=https://me:passed@host/score"], "reward.url"),
        (["reward=remote", "reward.url=https://host/score?api_key=passed"], "reward.url"),
        ([*REMOTE, "+reward.options.api_key=passed"], "reward.options.api_key"),
        ([*REMOTE, "+reward.api_key=passed"], "reward.api_key"),
        ([*REMOTE, "reward.template='{prompt}{response} ${oc.env:JUDGE_KEY}'"], "reward.template"),
        ([*REMOTE, f"reward.key_env={SECRET}"], "reward.key_env"),
        ([*BY_FUNCTION, "data.split=${oc.env:HF_TOKEN}"], "data.split"),
        ([*BY_FUNCTION, "tracker.wandb.tags=[a,'${oc.env:WANDB_API_KEY}']"], "tracker.wandb.tags[1]"),
        ([*BY_FUNCTION, "data.system=Use sk-abcdefghijklmnop1234 for it"], "data.system"),
        ([*BY_FUNCTION, "data.eval_path=https://me:passed@host/x.jsonl"], "data.eval_path"),
        ([*BY_FUNCTION, "+actor.hf_token=hf_ofNobodyAtAllButLong"], "actor.hf_token"),
        ([*BY_FUNCTION, "+actor.deepspeed.monitor.password=passed"], "actor.deepspeed.monitor.password"),
    ],
)
def test_a_key_in_a_config_is_refused_and_not_repeated(keys, arguments, key):
    with pytest.raises(UserError) as caught:
        load_config([*RUN, *arguments, "run.seed=nonsense"], world_size=1)
    line = line_of(caught)
    assert line.startswith(f"{key}: holds ") and "environment variable" in line
    assert not any(secret in line for secret in ("passed", SECRET, "hf_of", "0123456789", "sk-abc"))


def test_lines_are_censored(keys):
    told = (
        f"no such file: https://me:passed@host/x?token=passed&a=1 (in: a={SECRET} "
        "b=hf_ofNobodyAtAllButLong Bearer abcdefghij)"
    )
    assert censored(told) == "no such file: https://***@host/x?token=***&a=1 (in: a=*** b=*** ***)"
    assert censored("actor.optim.lr=fast: must be a number") == "actor.optim.lr=fast: must be a number"


def test_an_error_line_does_not_repeat_the_command_lines_key(keys):
    """Secrets are searched in the config, and overrides that cannot be parsed never become a config."""
    command = [
        sys.executable,
        str(ROOT / "launch" / "train.py"),
        "+experiment=rlhf",
        "https://me:passed@host/score",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and "error: " in done.stderr and "passed" not in done.stderr, done.stderr


# -- files of a run --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "/x", "..", "", "a\nb"])
def test_a_run_name_is_a_single_path_component(name):
    with pytest.raises(
        UserError, match="^run.name=.*: must be a single name without /"
    ):  # even if run.dir is given, because the name is also used as a title
        load_config(
            [*RUN, *BY_FUNCTION, f"run.name='{name}'", *(["run.dir=/tmp/x"] if name == "/x" else [])],
            world_size=1,
        )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_directory_is_private_to_its_owner(tmp_path):
    before = os.umask(0)
    try:
        open_run_directory(tmp_path / "outputs" / "mine", {"run": {}}, None)
        (tmp_path / "shared").mkdir(mode=0o775)
        open_run_directory(tmp_path / "shared", {"run": {}}, None)
    finally:
        os.umask(before)
    # the run directory is private, and the mode of its parent follows the umask
    assert mode(tmp_path / "outputs" / "mine") == 0o700 and mode(tmp_path / "outputs") == 0o777
    assert mode(tmp_path / "shared") == 0o775
    names = sorted(file.name for file in tmp_path.rglob("*"))
    assert names == ["config.yaml", "config.yaml", "mine", "outputs", "shared"]
