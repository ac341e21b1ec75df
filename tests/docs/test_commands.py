"""Tests that the commands, settings and keys on the Markdown pages are valid.

Commands are composed and checked in this process: nothing is loaded, and no process is started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.cli import find_folders, load_config, parse_options
from launch.doctor import parse as parse_doctor
from launch.pipeline import plan_pipeline
from ppo_ds.errors import UserError
from tests.docs.pages import ROOT, Block, blocks, name_of, pages, spans, words
from tests.test_requirements import KEYS, is_setting

# Programs that start the command after them; NAME=VALUE before a program sets a variable.
STARTERS = (
    "deepspeed",
    "torchrun",
    "python",
    "python3",
    ".venv/bin/python",
    ".venv-vllm/bin/python",
    "sbatch",
)
# Files and folders that the reader has: their absence is no error of the page.
OF_THE_READER = re.compile(r": (no such (file|folder)$|no such checkpoint folder;|not a model folder )")
# A run that needs nothing but the settings of a fragment such as reward=remote reward.url=...
BASE = (
    *("actor.model.path=org/actor", "data.path=org/prompts", "run.steps=2"),
    *("rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "sampling.max_new_tokens=8"),
)
FILES = re.compile(r"\.(html|id|json|jsonl|lock|log|md|png|py|yaml)$")
SECTIONS = {key.partition(".")[0] for key in KEYS}


def is_known(setting: str) -> bool:
    """Returns whether a key, or the option of a group such as model@actor.model=qwen3-0.6b, exists."""
    key, _, value = setting.lstrip("+~").partition("=")
    group = ROOT / "conf" / key.partition("@")[0]
    if "@" in key:
        return (group / f"{value}.yaml").exists()
    return key.endswith("_target_") or is_setting(setting.lstrip("~"))


class Command:
    """A command of a page, such as ``deepspeed --num_gpus 2 launch/train.py +experiment=rlhf``."""

    def __init__(self, block: Block, text: str):
        self.block, self.text = block, text
        self.words = words(text)
        found = [
            i for i, word in enumerate(self.words) if re.search(r"((^|/)\w+\.(py|sh)|ppo-ds-\w+\)?)$", word)
        ]
        self.script, at = (self.words[found[0]], found[0]) if found else ("", len(self.words))
        if "ppo-ds-" in self.script:  # the installed command of launch/NAME.py
            self.script = f"launch/{self.script.rpartition('-')[2].rstrip(')')}.py"
        self.launcher, self.arguments = self.words[:at], self.words[at + 1 :]

    def option(self, *names: str) -> int:
        """Returns the number after one of the launcher's or the script's options, or 1."""
        text = " ".join(self.words).replace("=", " ")
        found = re.search(rf"(?:{'|'.join(map(re.escape, names))}) (\d+)", text)
        return int(found[1]) if found else 1

    def __str__(self) -> str:
        return f"{self.block.name} {self.text[:60]}"


def is_fragment(line: str) -> bool:
    """Returns whether a line consists of settings only, as in ``algo=rloo algo.kl.coef=0.05``."""
    return (
        not line.endswith("\\")
        and "=" in line
        and all(re.match(r"[+~]?[a-z][\w.@]*=\S", word) for word in words(line))
    )


def commands() -> Iterator[Command]:
    for page in pages():
        for span in spans(page):  # commands in the text and in tables, without placeholders such as =NAME
            complete = not re.search(r"\.\.\.|[= ][A-Z]+( |$)", span)
            if complete and re.match(r"(deepspeed|torchrun|python|sbatch) .*\.(py|sh) ", span):
                yield Command(Block(name_of(page), 0, "", (span,), False), span)
        for block in blocks(page):
            for line in block.commands() if block.language in ("", "bash", "text") else ():
                if re.match(
                    r"(\w+=\S* )*(\S*/)?(deepspeed|torchrun|python3?|sbatch|make|docker run|launch/|ppo-ds-)",
                    line,
                ):
                    yield Command(block, line)


def fragments() -> list[tuple[str, str]]:
    return [
        (block.name, line)
        for page in pages()
        for block in blocks(page)
        if block.language in ("", "text")
        for line in block.commands()
        if is_fragment(re.sub(r"\s#.*", "", line))
    ]


ALL = list(commands())
RUNS = [
    one
    for one in ALL
    if one.script in ("launch/train.py", "launch/cluster/deepspeed.sh", "launch/cluster/slurm.sh")
]
PIPELINES = [one for one in ALL if one.script == "launch/pipeline.py" or one.words[:1] == ["make"]]
OTHERS = [one for one in ALL if one.script and one not in (*RUNS, *PIPELINES)]


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to a directory in which pages find only the folders that they may name."""
    for name in ("docs", "conf"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


def problems(arguments: list[str], ranks: int) -> list[str]:
    """Returns the errors of a command line that are errors of the page."""
    try:
        load_config(arguments, world_size=ranks)
    except UserError as error:
        return [line for line in error.problems if not OF_THE_READER.search(line)]
    except SystemExit as end:
        return [] if not end.code else [f"exit code {end.code}"]
    return []


@pytest.mark.usefixtures("all_extras")
@pytest.mark.parametrize("command", RUNS, ids=str)
def test_each_run_has_a_valid_config(command: Command) -> None:
    arguments, nodes = command.arguments, command.option("--nodes", "--nnodes")
    ranks = command.option("--num_gpus", "--nproc-per-node", "--nproc_per_node") * nodes
    if command.script.endswith("deepspeed.sh"):
        arguments, ranks = arguments[1:], 16  # two nodes of eight GPUs, as in launch/cluster/hostfile
    if command.script.endswith("slurm.sh"):
        ranks = 8 * nodes
    assert problems(arguments, ranks) == []


@pytest.mark.parametrize("command", PIPELINES, ids=str)
def test_each_pipeline_has_valid_configs(command: Command) -> None:
    arguments = command.arguments
    if command.words[0] == "make":
        target = {"quickstart": "quickstart", "pipeline": "learned_reward"}.get(command.words[1])
        if target is None:
            makefile = (ROOT / "Makefile").read_text()
            assert f"\n{command.words[1]}:" in makefile
            return
        given = next((word for word in command.words if word.startswith("ARGS=")), "ARGS=")
        arguments = [f"+pipeline={target}", *given.removeprefix("ARGS=").split()]
    options = parse_options(arguments, prog="launch/pipeline.py")
    plan_pipeline(find_folders(options), options.overrides)


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_each_other_command_has_its_options(command: Command) -> None:
    if command.script == "launch/doctor.py":
        options, overrides = parse_doctor(command.arguments)
        gpus = options.gpus or 1
        assert problems(overrides, gpus * (options.nodes or 1)) == []
        return
    file = ROOT / command.script
    if not file.exists():  # a file that the page itself creates
        assert not command.script.startswith(("launch/", "benchmarks/", "tests/")), f"no such file: {file}"
        return
    known = "".join(path.read_text() for path in file.parent.glob("*.py"))
    options = [word.partition("=")[0] for word in command.arguments if word.startswith("--")]
    assert [option for option in options if f'"{option}"' not in known] == []
    bare = [re.sub(r"^\w+:(?!//)", "", word) for word in command.arguments]  # without NAME: of evaluations
    settings = [word for word in bare if re.match(r"[+~]?[a-z][\w.@]*=", word)]
    assert [word for word in settings if not is_known(word)] == []


@pytest.mark.usefixtures("all_extras")
@pytest.mark.parametrize(("place", "line"), fragments())
def test_each_fragment_of_settings_is_valid(place: str, line: str) -> None:
    given = words(line)
    reward = () if any(word.startswith("reward") for word in given) else ("reward=numeric",)
    experiment = any(word.startswith("+experiment") for word in given)
    assert problems([*given] if experiment else [*BASE, *reward, *given], 1) == [], place


def own_spans(page: Path) -> list[str]:
    """Returns the inline code of a page, without the names of other systems in tables."""
    text = page.read_text(encoding="utf-8")
    if page.name == "coming_from.md":
        text = re.sub(r"^(\| `[^|]*\|).*", r"\1", text, flags=re.M)
        return re.findall(r"`([^`\n]+)`", text)
    return list(spans(page))


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_keys_and_settings_in_the_text_exist(page: Path) -> None:
    wrong = []
    for span in own_spans(page):
        if re.fullmatch(rf"({'|'.join(SECTIONS)})(\.\w+)+", span) and not FILES.search(span):
            known = (
                span in KEYS or any(key.startswith(f"{span}.") for key in KEYS) or span.startswith("reward.")
            )
            wrong += [] if known else [span]
        elif is_fragment(span) and not re.search(r"[A-Z]{3}|\.\.\.", span):
            wrong += [word for word in words(span) if "." in word.partition("=")[0] and not is_known(word)]
    assert wrong == []


def lines_of(page: str) -> list[str]:
    """Returns the commands of a page without their comments: those of code blocks, then those of the text."""
    file = ROOT / page
    code = [re.sub(r"\s+# .*", "", line) for block in blocks(file) for line in block.commands()]
    return code + [span for span in spans(file) if re.match(r"(deepspeed|python|sbatch) ", span)]


def test_the_chinese_readme_has_the_commands_of_the_english_one() -> None:
    assert lines_of("README.zh.md") == lines_of("README.md")


def test_the_first_run_has_the_commands_of_the_readme() -> None:
    readme = next(block for block in blocks(ROOT / "README.md") if "my_reward" in "".join(block.lines))
    own = [re.sub(r"\s+# .*", "", line) for line in readme.commands()]
    page = "\n".join(lines_of("docs/first_run.md"))
    assert len(own) > 15 and [line for line in own if line not in page] == []


def test_the_commands_are_found() -> None:
    assert len(RUNS) > 15 and len(PIPELINES) > 3 and len(OTHERS) > 15 and len(fragments()) > 5


@pytest.mark.parametrize("wrong", ["+experiment=nothing", "algo.kl.coeff=0.1", "run.steps=many"])
def test_wrong_settings_are_found(wrong: str) -> None:
    assert problems(["+experiment=quickstart", wrong], 1)
