"""Tests the layers: imports go in one direction only, and each heavy dependency is used in one place.

Imports inside functions count too.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lists what each package may import from ppo_ds besides itself. Every other import from ppo_ds is an error.
BOTTOM = {"errors", "secrets", "types", "ops", "compute", "algorithm", "config", "storage", "commands"}
MIDDLE = BOTTOM | {"distributed", "models"}
HOMES_OF_LIBRARIES = {"tracking", "models", "data", "rollout", "rewards", "engine", "background"}
MAY = {
    "errors": set(),
    "commands": set(),
    "registered": set(),
    "secrets": set(),
    "storage": {"errors"},
    "types": {"errors"},
    "ops": set(),
    "compute": {"ops"},
    "algorithm": {"types", "ops", "config"},
    "config": {"errors", "secrets", "algorithm", "rollout"},  # of the last two only the keys, see below
    "distributed": BOTTOM,
    "background": BOTTOM | {"distributed"},
    "tracking": BOTTOM,
    "models": BOTTOM | {"distributed"},
    "data": MIDDLE,
    "rollout": MIDDLE,
    "rewards": MIDDLE | {"background"},
    "engine": MIDDLE,
    "environments": MIDDLE | {"background", "data", "rollout"},
    "examples": BOTTOM | {"models"},
    "run": MIDDLE | HOMES_OF_LIBRARIES,
    "ppo": MIDDLE | HOMES_OF_LIBRARIES | {"run"},
    "finetune": MIDDLE | HOMES_OF_LIBRARIES | {"run"},
    "planning": MIDDLE | {"engine", "rollout", "tracking", "run", "ppo"},
    "assemble": MIDDLE | HOMES_OF_LIBRARIES | {"environments", "run", "ppo", "finetune", "planning"},
    "tools": MIDDLE | HOMES_OF_LIBRARIES | {"run", "ppo", "finetune", "planning", "assemble"},
    "launch": MIDDLE | HOMES_OF_LIBRARIES | {"run", "ppo", "finetune", "assemble", "tools", "registered"},
}

HOMES = {
    "hydra": {"launch"}, "omegaconf": {"launch"},
    "transformers": {"models", "rollout"}, "peft": {"models"}, "tokenizers": {"models"},
    "accelerate": {"models"}, "huggingface_hub": {"models"},
    "datasets": {"data"},
    "deepspeed": {"engine", "distributed"},
    # only World, the store and DeepSpeed communicate; an adapter of a decode engine may be added
    "torch.distributed": {"distributed"}, "deepspeed.comm": {"distributed"},
    "httpx": {"rewards", "launch"}, "math_verify": {"rewards"},
    "reasoning_gym": {"data", "rewards"},
    "wandb": {"tracking"}, "rich": {"tracking", "tools"}, "matplotlib": {"tracking"},
    "tensorboard": {"tracking"}, "torch.utils.tensorboard": {"tracking"}, "trackio": {"tracking"},
    "wandb_workspaces": {"tools"}, "textarena": {"examples"},
}  # fmt: skip


def part_of(file: Path) -> str:
    """Returns the part to which a file belongs.

    For example models for ppo_ds/models/policy.py, types for ppo_ds/types.py, and launch for launch/train.py.
    """
    package, *rest = file.with_suffix("").parts
    return rest[0] if package == "ppo_ds" and rest[0] != "__init__" else package


def imports(file: Path, source: str) -> list[tuple[int, str]]:
    """Returns (line, full module name) of every import in the file.

    Relative imports are resolved; ``from a import b`` gives both a and a.b.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = file.parent.parts[: len(file.parent.parts) - node.level + 1] if node.level else ()
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.args[0] if node.args else None, ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__"):
                found.append((node.lineno, str(node.args[0].value)))
    return found


def uses(source: str) -> list[tuple[int, str]]:
    """Returns (line, dotted name) of every attribute chain that starts with an imported module.

    ``torch.distributed.barrier()`` needs no separate import. Names are those of the modules, also after
    ``import torch as t``.
    """
    tree = ast.parse(source)
    aliases = {
        alias.asname: f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, dot, rest = ast.unparse(node).partition(".")
            found.append((node.lineno, aliases.get(first, first) + dot + rest))
    return found


def problems(file: Path, source: str) -> list[str]:
    """Returns the errors in the imports of one file; ``file`` is relative to the root of the repository."""
    part, found = part_of(file), []
    for line, name in imports(file, source):
        package, *rest = name.split(".")
        other = rest[0] if package == "ppo_ds" and rest else package
        if (
            package in ("ppo_ds", "launch")
            and part != "ppo_ds"
            and other != part
            and other not in MAY.get(part, set())
        ):
            found.append(f"{file}:{line}: {part} imports {other}: an arrow that points left")
    if part not in MAY and part != "ppo_ds":
        found.append(f"{file}:1: {part} has no place among the layers")
    for line, name in imports(file, source) + [
        use for use in uses(source) if use[1].startswith(("torch.distributed", "deepspeed.comm"))
    ]:
        for heavy, homes in HOMES.items():
            if f"{name}.".startswith(f"{heavy}.") and part not in homes:
                found.append(f"{file}:{line}: {heavy} outside its home ({', '.join(homes)})")
    return sorted(set(found))


def python_files() -> list[Path]:
    return sorted(
        file.relative_to(ROOT) for folder in ("ppo_ds", "launch") for file in (ROOT / folder).rglob("*.py")
    )


def test_the_layers_hold():
    files = python_files()
    assert len(files) > 20
    assert [problem for file in files for problem in problems(file, (ROOT / file).read_text())] == []


def test_config_imports_only_the_keys_of_the_algorithm_and_of_rollout():
    files = [file for file in python_files() if part_of(file) == "config"]
    names = {
        name
        for file in files
        for _, name in imports(file, (ROOT / file).read_text())
        if name.startswith(("ppo_ds.algorithm", "ppo_ds.rollout"))
    }
    assert names and all(".keys" in name for name in names)


def test_the_docs_name_every_package_and_every_file_of_assemble():
    architecture, contributing = (
        (ROOT / name).read_text() for name in ("docs/architecture.md", "CONTRIBUTING.md")
    )
    folders = architecture.split("## Folders")[1]
    packages = {path.parent.name for path in (ROOT / "ppo_ds").glob("*/__init__.py")}
    assert len(packages) > 10 and [name for name in sorted(packages) if f"{name}/`" not in folders] == []
    files = {path.name for path in (ROOT / "ppo_ds" / "assemble").glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(files) if f"`{name}`" not in contributing] == []


def test_package_inits_are_empty():
    assert [
        str(file)
        for file in python_files()
        if file.name == "__init__.py" and file.parent != Path("ppo_ds") and (ROOT / file).read_text().strip()
    ] == []


def test_ops_and_compute_need_torch_and_the_standard_library_only():
    allowed = sys.stdlib_module_names | {"torch", "ppo_ds"}
    files = [file for file in python_files() if part_of(file) in ("ops", "compute")]
    outside = {
        (str(file), name)
        for file in files
        for _, name in imports(file, (ROOT / file).read_text())
        if name.split(".")[0] not in allowed
    }
    assert not outside


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("ppo_ds/ops/masked.py", "from ppo_ds.types import Metrics", "ops imports types"),
        ("ppo_ds/models/policy.py", "from ..engine.world import World", "models imports engine"),
        ("ppo_ds/rewards/model.py", "def f():\n    from ppo_ds.rollout import hf", "rewards imports rollout"),
        ("ppo_ds/ppo/trainer.py", "from ppo_ds.assemble.ppo import build_ppo", "ppo imports assemble"),
        ("ppo_ds/assemble/ppo.py", "from launch.cli import load_config", "assemble imports launch"),
        ("ppo_ds/ppo/trainer.py", "import deepspeed", "deepspeed outside"),
        ("ppo_ds/ppo/trainer.py", "from torch import distributed", "torch.distributed outside"),
        ("ppo_ds/ppo/trainer.py", "import torch\ntorch.distributed.barrier()", "torch.distributed outside"),
        ("ppo_ds/engine/rng.py", "import torch as t\nt.distributed.barrier()", "torch.distributed outside"),
        ("ppo_ds/engine/rng.py", "from deepspeed import comm as dist", "deepspeed.comm outside"),
        ("ppo_ds/rollout/hf.py", "def f():\n    import torch.distributed", "torch.distributed outside"),
        (
            "ppo_ds/engine/hybrid.py",
            "import importlib\nimportlib.import_module('transformers.generation')",
            "transformers outside",
        ),
        ("ppo_ds/assemble/ppo.py", "import wandb", "wandb outside"),
        ("ppo_ds/mystery/new.py", "", "no place among the layers"),
    ],
)
def test_the_checker_finds_forbidden_imports(file, source, wrong):
    (problem,) = problems(Path(file), source)
    assert wrong in problem and problem.startswith(file)
