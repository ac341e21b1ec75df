"""Builds and runs the image of a Dockerfile without Docker, as root: overlay mounts, namespaces and chroot.

python -m tests.image.chroot    builds the image and prints the time and the size of each layer
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}  # Debian's releases by the version of their Python
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-pip,python-is-python3,ca-certificates"

# Mounts the file systems that Docker mounts in a container, and executes the command as the first process of
# its namespace. Arguments: the root, the user, the working directory, the variables and the command.
INIT = r"""
set -e
root=$1 user=$2 directory=$3
shift 3
mount -t overlay overlay -o "$OVERLAY" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount -t tmpfs -o "size=$SHM" tmpfs "$root/dev/shm"
while read -r source target; do
    mount --bind "$source" "$root$target"
done <<<"$BINDS"
[ -z "$LOOPBACK" ] || "$PYTHON" -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))'
exec chroot --userspec="$user" "$root" env -i -C "$directory" "$@"
"""


def instructions(text: str) -> list[tuple[str, str]]:
    """Returns the instructions of a Dockerfile and their arguments, without comments, on one line each."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def ignored(patterns: list[str], path: str) -> bool:
    """Returns whether the patterns of a .dockerignore match a path of the context or a folder above it."""
    parts = path.split("/")
    above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    return any(
        fnmatch.fnmatch(f"/{folder}", pattern.replace("**/", "*/") if "**/" in pattern else f"/{pattern}")
        for folder in above
        for pattern in patterns
    )


@dataclass
class Layer:
    instruction: str
    files: Path
    seconds: float

    @property
    def megabytes(self) -> float:
        done = subprocess.run(["du", "-sk", str(self.files)], capture_output=True, text=True, check=True)
        return int(done.stdout.split()[0]) / 1024


@dataclass
class Image:
    """An image whose instructions are executed one after the other, each into a folder of its own."""

    folder: Path
    context: Path
    layers: list[Layer]
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    directory: str = "/"
    user: str = "0"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    volumes: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def build(self, dockerfile: str) -> None:
        """Executes the instructions of a Dockerfile; the first layer takes the place of the base image."""
        for kind, text in instructions(dockerfile):
            match kind:
                case "ARG" | "FROM":
                    continue
                case "ENV":
                    self.environment |= dict(word.split("=", 1) for word in shlex.split(text))
                case "WORKDIR":
                    self.directory = text
                    with self._layer(f"{kind} {text}") as files:
                        self.find(text).exists() or (files / text[1:]).mkdir(parents=True)
                case "SHELL":
                    self.shell = json.loads(text)
                case "COPY":
                    *sources, target = text.split()
                    with self._layer(f"{kind} {text}") as files:
                        self._copy(sources, files / os.path.join(self.directory, target)[1:])
                case "RUN":
                    with self._layer(f"{kind} {text}") as files:
                        self._run([*self.shell, text], files)
                case "USER":
                    self.user = text
                case "VOLUME":
                    self.volumes = json.loads(text)
                case "HEALTHCHECK":
                    self.health = json.loads(text.partition("CMD ")[2])
                case "ENTRYPOINT":
                    self.entrypoint = json.loads(text)
                case "CMD":
                    self.command = json.loads(text)
                case _:
                    raise NotImplementedError(f"{kind} {text}")

    @contextmanager
    def _layer(self, instruction: str) -> Iterator[Path]:
        files = self.folder / f"layer{len(self.layers)}"
        files.mkdir()
        started = time.monotonic()
        yield files
        self.layers.append(Layer(instruction, files, time.monotonic() - started))

    def find(self, path: str) -> Path:
        """Returns where a path of the image is: in the last layer that has it, or in the base."""
        places = [layer.files / path[1:] for layer in reversed(self.layers)]
        return next((place for place in places if place.exists()), places[-1])

    def _copy(self, sources: list[str], target: Path) -> None:
        """Copies files of the context as COPY does: folders without their names, root as the owner."""
        patterns = (self.context / ".dockerignore").read_text().split()
        for source in sources:
            path = self.context / source
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            for file in files:
                name = str(file.relative_to(self.context))
                if not ignored(patterns, name):
                    place = target / file.relative_to(path if path.is_dir() else path.parent)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, place)
                    os.chown(place, 0, 0)

    def _run(self, command: list[str], files: Path) -> None:
        binds = {Path("/etc/resolv.conf").resolve(): "/etc/resolv.conf"}
        certificates = Path("/etc/ssl/certs/ca-certificates.crt")
        if certificates.is_file():
            binds[certificates] = str(certificates)
        start = self.start(command, files, user=self.user, binds=binds, network=True)
        output, _ = start.communicate()
        if start.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {start.returncode}\n{output}")

    def start(
        self,
        command: list[str],
        files: Path,
        *,
        user: str,
        binds: Mapping[Path, str],
        network: bool = False,
        shm: str = "64m",
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Starts a command in a container whose changes go to ``files``; returns its parent process."""
        root, work = (self.folder / f"{files.name}.{kind}" for kind in ("root", "work"))
        for path in (root, work):
            path.mkdir(exist_ok=True)
        lower = ":".join(str(layer.files) for layer in reversed(self.layers))
        settings = {
            "OVERLAY": f"lowerdir={lower},upperdir={files},workdir={work}",
            "SHM": shm,
            "BINDS": "\n".join(f"{source} {target}" for source, target in binds.items()),
            "LOOPBACK": "" if network else "1",
            "PYTHON": sys.executable,
        }
        namespaces = ["--mount", "--pid", "--ipc", "--uts", *([] if network else ["--net"])]
        given = [f"{name}={value}" for name, value in (self.environment | variables).items()]
        # a process that was started in the background of a script ignores Ctrl-C, and so would the container
        start = ["env", "--default-signal", "unshare", *namespaces, "--fork", "--kill-child"]
        return subprocess.Popen(
            [*start, "bash", "-c", INIT, "init"] + [str(root), user, self.directory, *given, *command],
            env={"PATH": os.environ["PATH"]} | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


class Container:
    """A container of an image, as started by docker run with --user, -v, -e and --entrypoint."""

    def __init__(
        self,
        image: Image,
        folder: Path,
        *arguments: str,
        user: str = "",
        binds: Mapping[Path, str] | None = None,
        entrypoint: list[str] | None = None,
        shm: str = "64m",
        **variables: str,
    ):
        self.image, self.user, self.changes = image, user or image.user, folder / "changes"
        self.changes.mkdir(parents=True)
        self.mounted = dict(binds or {})
        for number, path in enumerate(set(image.volumes) - set(self.mounted.values())):
            volume, given = folder / f"volume{number}", image.find(path).stat()
            volume.mkdir()  # a new volume gets the owner and the mode of the image's folder
            os.chown(volume, given.st_uid, given.st_gid)
            volume.chmod(given.st_mode)
            self.mounted[volume] = path
        command = [*(entrypoint or image.entrypoint), *(arguments or image.command)]
        self.process = image.start(
            command, self.changes, user=self.user, binds=self.mounted, shm=shm, **variables
        )

    def wait(self) -> tuple[int, str]:
        """Returns the exit code and the output of the first process."""
        output, _ = self.process.communicate(timeout=600)
        return self.process.returncode, output

    def first_process(self) -> int:
        """Returns the id, outside of the container, of its first process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])

    def volume(self, path: str) -> Path:
        """Returns the folder that is mounted at a path of the container."""
        return next(folder for folder, target in self.mounted.items() if target == path)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.first_process(), number)

    def execute(self, *command: str) -> tuple[int, str]:
        """Executes a command in the container as docker exec and the health check do."""
        user, _, group = self.user.partition(":")
        given = [f"{name}={value}" for name, value in self.image.environment.items()]
        done = subprocess.run(
            ["nsenter", f"--target={self.first_process()}", "--mount", "--pid", "--net", "--ipc", "--uts"]
            + ["--root", f"--setuid={user}", f"--setgid={group or user}"]
            + ["env", "-i", "-C", self.image.directory, *given, *command],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def remove(self) -> None:
        """Ends all processes of the container."""
        self.process.kill()
        self.process.wait()


def unavailable(folder: Path) -> str:
    """Returns why no container can be started here, or an empty text."""
    if os.getuid() != 0:
        return "needs root, for chroot and mounts"
    if sys.version_info[:2] not in SUITES:
        return "no release of Debian has this version of Python"
    missing = [name for name in ("unshare", "nsenter", "apt-get", "dpkg") if not shutil.which(name)]
    if missing:
        return f"needs {', '.join(missing)}"
    for name in ("lower", "upper", "work", "root"):
        (folder / name).mkdir()
    options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork"]
        + ["mount", "-t", "overlay", "overlay", "-o", options, str(folder / "root")],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"no overlay mount in a namespace: {done.stderr.strip()}"
    release = f"{MIRROR}/dists/{SUITES[sys.version_info[:2]]}/Release"
    try:
        urllib.request.urlopen(release, timeout=30).close()
    except OSError as error:
        return f"needs a network: {release}: {error}"
    return ""


def stand_in(folder: Path) -> Layer:
    """Makes what takes the place of the base image: Debian with its Python and pip, and the torch of here.

    Like the base image, it has an externally managed Python, into which pip installs only with
    PIP_BREAK_SYSTEM_PACKAGES.
    """
    started, base = time.monotonic(), folder / "base"
    tool, settings = shutil.which("debootstrap"), {}
    if not tool:  # from Debian, without an installation
        subprocess.run(["apt-get", "download", "-q", "debootstrap"], cwd=folder, check=True)
        (package,) = folder.glob("debootstrap_*.deb")
        subprocess.run(["dpkg", "-x", str(package), str(folder / "tool")], check=True)
        tool = str(folder / "tool/usr/sbin/debootstrap")
        settings["DEBOOTSTRAP_DIR"] = str(folder / "tool/usr/share/debootstrap")
    suite = SUITES[sys.version_info[:2]]
    (base / "etc/dpkg/dpkg.cfg.d").mkdir(parents=True)
    # dpkg otherwise syncs every file
    (base / "etc/dpkg/dpkg.cfg.d/unsafe").write_text("force-unsafe-io\n")
    subprocess.run(
        [tool, "--variant=minbase", f"--include={PACKAGES}", suite, str(base), MIRROR],
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    packages = base / f"usr/local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/dist-packages"
    for name in sorted(_closure("torch")):
        found = distribution(name)
        for file in found.files or ():
            if ".." not in file.parts:
                place = packages / file
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(found.locate_file(file), place)
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j0", str(packages)], check=False)
    (base / "etc/hosts").write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
    return Layer("stand-in for the base image", base, time.monotonic() - started)


def _closure(name: str) -> set[str]:
    """Returns the names of a package and of all packages that it needs here."""
    names, added = set[str](), {name}
    while added:
        names |= added
        needed = [Requirement(line) for item in added for line in distribution(item).requires or ()]
        added = {
            need.name for need in needed if not need.marker or need.marker.evaluate({"extra": ""})
        } - names
    return names


def main() -> None:
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if reason := unavailable(folder):
            sys.exit(reason)
        image = Image(folder, root, [stand_in(folder)])
        image.build((root / "Dockerfile").read_text())
        for layer in image.layers:
            print(f"{layer.seconds:6.1f} s {layer.megabytes:7.1f} MB  {layer.instruction[:70]}")


if __name__ == "__main__":
    main()
