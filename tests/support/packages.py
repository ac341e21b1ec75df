"""Creates packages without content for tests of pip: installed ones, and wheels to install."""

from __future__ import annotations

import re
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def metadata(name: str, version: str, *requires: str, extras: tuple[str, ...] = ()) -> str:
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    return "\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n"


def known_metadata(name: str, version: str) -> str:
    """Returns the metadata of the package here, with ``version``; without requirements if it is missing."""
    try:
        found = distribution(name)  # an older pip writes PKG-INFO for packages without a pyproject.toml
        text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    except PackageNotFoundError:
        return metadata(name, version)
    return re.sub(r"^Version: .*", f"Version: {version}", text, count=1, flags=re.MULTILINE)


def info_name(text: str) -> str:
    """Returns NAME-VERSION, the first part of the names of a wheel and of an installed package's files."""
    name, version = (re.search(rf"^{key}: (.*)", text, re.MULTILINE) for key in ("Name", "Version"))
    assert name and version
    return f"{re.sub(r'[-_.]+', '_', name[1]).lower()}-{version[1]}"


def write_wheel(folder: Path, text: str) -> None:
    """Writes a wheel with the given metadata and no files."""
    stem = info_name(text)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        files = {"METADATA": text, "WHEEL": WHEEL}
        for name, content in files.items():
            wheel.writestr(f"{stem}.dist-info/{name}", content)
        record = "".join(f"{stem}.dist-info/{name},,\n" for name in (*files, "RECORD"))
        wheel.writestr(f"{stem}.dist-info/RECORD", record)


def create_environment(folder: Path, with_pip: bool = False) -> Path:
    """Creates a virtual environment and returns its folder of packages."""
    venv.create(folder, with_pip=with_pip, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    return packages


def pretend_installed(packages: Path, text: str) -> Path:
    """Makes pip believe that a package with the given metadata is installed; returns its dist-info folder."""
    folder = packages / f"{info_name(text)}.dist-info"
    folder.mkdir()
    for name, content in {"METADATA": text, "WHEEL": WHEEL, "INSTALLER": "pip\n"}.items():
        (folder / name).write_text(content)
    names = ("METADATA", "WHEEL", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))
    return folder
