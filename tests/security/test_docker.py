"""Tests the contents of the Docker image."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"([a-z0-9-]+)==(\S+?)(?: ;.*)?$")


def pins(text: str) -> dict[str, str]:
    """Maps packages to their versions, from lines of the form name==version."""
    lines = [line.strip() for line in text.splitlines() if line and not line.startswith(("#", " "))]
    return {m[1]: m[2] for m in map(PIN.match, (line.removesuffix("\\").strip() for line in lines)) if m}


def test_every_line_of_the_lock_has_hashes_and_the_version_of_the_constraints():
    lock, constraints = (ROOT / "requirements.lock").read_text(), (ROOT / "constraints.txt").read_text()
    requirements = [
        entry for entry in re.sub(r"\\\n *", "", lock).splitlines() if entry and not entry.startswith("#")
    ]
    assert len(requirements) > 50
    for requirement in requirements:
        assert re.search(r"^\S+==\S+( ;.*?)?( ?--hash=sha256:[0-9a-f]{64})+$", requirement), requirement[:200]
    tested = pins(constraints)
    assert len(pins(lock)) == len(requirements) and "torch" not in pins(lock)
    for name, version in pins(lock).items():
        assert tested[name] == version, name


def test_the_lock_has_every_package_that_the_project_needs():
    listed = (ROOT / "setup.cfg").read_text().split("install_requires =")[1].split("\n\n")[0].lower()
    needed = set(re.findall(r"^ +([a-z0-9-]+)", listed, re.MULTILINE)) - {"torch"}
    assert len(needed) > 10 and needed <= set(pins((ROOT / "requirements.lock").read_text()))


def test_the_image_installs_hashed_files_only_and_has_no_rights_of_root():
    steps = (ROOT / "Dockerfile").read_text()
    installs = re.findall(r"pip install ([^&\n]*)", re.sub(r"\\\n *", "", steps))
    assert installs and all("--no-deps" in install for install in installs)
    assert "--require-hashes --no-deps -r requirements.lock" in steps
    users = re.findall(r"^USER (\S+)", steps, re.MULTILINE)
    assert users and users[-1] not in ("root", "0") and steps.index("USER ") < steps.index("ENTRYPOINT")


def test_the_run_cannot_change_files_whatever_their_modes_in_the_checkout(tmp_path):
    (command,) = re.findall(
        r"^RUN (chmod -R .*) /workspace$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
    )
    for number, mode in enumerate((0o666, 0o600, 0o777, 0o700)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "file").touch()
        (tmp_path / str(number) / "file").chmod(mode)
        (tmp_path / str(number)).chmod(mode | 0o100)
    subprocess.run([*command.split(), str(tmp_path)], check=True)
    modes = [(tmp_path / str(i) / "file").stat().st_mode & 0o777 for i in range(4)]
    assert modes == [0o644] * 2 + [0o755] * 2
    assert {(tmp_path / str(i)).stat().st_mode & 0o777 for i in range(4)} == {0o755}
    text = (ROOT / "Dockerfile").read_text()
    assert text.index("COPY . .") < text.index(command) < text.index("USER 10001")
