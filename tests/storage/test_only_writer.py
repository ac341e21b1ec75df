"""Tests that only storage/drafts.py writes files; each exception is listed with its reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ALLOWED = {
    ("launch/cluster/environment.py", "open"): "the variables of the other nodes; no file of a run",
    ("launch/cluster/environment.py", "fdopen"): "the same",
    ("launch/evaluate.py", "TemporaryFile"): "tests whether --out is writable; the file is removed",
    ("launch/cli.py", "open"): "/dev/null, in place of a closed pipe",
    ("ppo_ds/assemble/dry_run.py", "touch"): "marks the new directory of a dry run",
    ("ppo_ds/run/record.py", "rename"): "moves the files of an earlier run within the run directory",
    ("ppo_ds/engine/checkpoint/checkpoints.py", "rename"): "gives a checkpoint the name of a draft",
    ("ppo_ds/engine/checkpoint/files.py", "save_file"): "into a draft directory",
    ("ppo_ds/models/lora.py", "save_file"): "into a draft directory",
    ("ppo_ds/models/lora.py", "save_pretrained"): "into a draft directory",
    ("ppo_ds/models/policy.py", "save_pretrained"): "into a draft directory",
    ("ppo_ds/models/value.py", "save_pretrained"): "into a draft directory",
    ("ppo_ds/models/tokenizer.py", "save_pretrained"): "into a draft directory",
    ("ppo_ds/models/tiny.py", "save_pretrained"): "into a draft directory, or the new one of a dry run",
    ("ppo_ds/rollout/vllm_adapters.py", "TemporaryDirectory"): "LoRA adapters until vLLM has read them",
    ("ppo_ds/tools/metrics_page.py", "write_text"): "docs/metrics.md; no file of a run",
    ("ppo_ds/tracking/curves.py", "savefig"): "to a draft",
}
WRITERS = set(
    "write_text write_bytes rename renames touch fdopen savefig save_file save_pretrained symlink_to "
    "hardlink_to symlink link mkdtemp mkstemp NamedTemporaryFile TemporaryFile TemporaryDirectory "
    "FileHandler to_csv to_json to_parquet".split()
)
# dotted, because the last names are too common
OF_MODULES = {"os.replace", "os.open", "torch.save", "np.save", "numpy.save"}


def writers(source: str) -> set[str]:
    """Returns the names of the functions in a source that write files."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        whole = ast.unparse(node.func)
        name = whole.rpartition(".")[2]
        copies = whole.startswith("shutil.") and name not in ("rmtree", "disk_usage", "which")
        if copies or whole in OF_MODULES or name in WRITERS:
            found.add(name)
        if name == "open" and whole != "os.open":
            modes = [*node.args[whole == "open" :], *(k.value for k in node.keywords if k.arg == "mode")][:1]
            if modes and isinstance(modes[0], ast.Constant) and set(str(modes[0].value)) & set("wax+"):
                found.add("open")
    return found


def test_no_other_code_writes_files():
    files = [file for folder in ("ppo_ds", "launch") for file in (ROOT / folder).rglob("*.py")]
    found = {
        (str(file.relative_to(ROOT)), writer)
        for file in files
        if file.parent.name != "storage"
        for writer in writers(file.read_text())
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        *("p.write_text(x)", "p.open('w')", "open(p, 'ab')", "open(p, mode='x')", "os.open(p, f)"),
        *("os.replace(a, b)", "p.rename(q)", "save_file(x, p)", "tempfile.mkdtemp()", "shutil.copy(a, b)"),
        "torch.save(x, p)",
    ],
)
def test_the_scanner_finds_each_form(source):
    assert writers(source)


@pytest.mark.parametrize("source", ["open(p)", "p.open('rb')", "d.copy()", "text.replace(a, b)", "c.open(4)"])
def test_the_scanner_accepts_reading(source):
    assert not writers(source)
