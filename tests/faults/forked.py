"""Ranks of the trainer for a second each: forked from one process that has imported everything. ``launch/train.py``'s own main runs in them.

    with Ranks(folder) as ranks:  # or Ranks(folder, main="package.module:main")
        run = ranks.start(2, ["run.dir=...", ...], fault="kill@checkpoint.before:at=2")
        os.kill(run.pids[1], signal.SIGKILL)
        assert ranks.wait(run) == [-9, -9]

NAN in a run's environment makes numbers NaN, see injection.py. Like a launcher, ``wait`` ends what is left once a rank has ended badly. Nothing outlives the ``with``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHARD_BYTES = 30_000  # so that both ranks of a tiny model write
GRACE = 15.0  # seconds that the other ranks have after one has ended badly; after a SIGKILL none
PATIENCE = 300.0


@dataclass
class Run:
    pids: list[int]
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Ranks:
    """The client's side."""

    def __init__(self, folder: Path, main: str = "launch.train:main"):
        self._folder, self._main, self._runs = folder, main, 0

    def __enter__(self) -> Ranks:
        clean = {
            key: value
            for key, value in os.environ.items()
            if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        quiet = {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
        }
        self._server = subprocess.Popen(
            [sys.executable, __file__, self._main],
            env=clean | quiet | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._folder / "forked.log").open("w"),
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)  # the server and all that it has forked
        self._server.wait()

    def start(self, ranks: int, arguments: list[str], *, fault: str | None = None, **environment: str) -> Run:
        self._runs += 1
        log = self._folder / f"run_{self._runs:02d}.log"
        more = environment | ({"PPO_DS_FAULT": fault} if fault else {})
        return Run(
            self._ask(do="start", ranks=ranks, arguments=arguments, environment=more, log=str(log)), log
        )

    def wait(self, run: Run) -> list[int]:
        """Exit codes by rank; minus the signal's number where one ended it."""
        return self._ask(do="wait", pids=run.pids)

    def run(
        self, ranks: int, arguments: list[str], *, fault: str | None = None, **environment: str
    ) -> tuple[list[int], str]:
        """Exit codes, and all that was printed."""
        run = self.start(ranks, arguments, fault=fault, **environment)
        return self.wait(run), run.output()

    def _ask(self, **request: Any) -> Any:
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, (self._folder / "forked.log").read_text()
        return json.loads(answer)


# -- the server's side, in a process of its own ---------------------------------------------------------------------------------------------


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import launch.train

    launch.train.prepare_environment(verbose=False)
    import transformers.models.llama.modeling_llama  # noqa: F401

    import ppo_ds.build.run  # noqa: F401
    from ppo_ds.engine.checkpoint import shards

    shards.SHARD_BYTES = SHARD_BYTES
    module, _, name = sys.argv[1].partition(":")
    main = getattr(importlib.import_module(module), name)
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("do") == "start":
            answer = _start(main, **request)
        else:
            answer = _wait(**request)
        print(json.dumps(answer), file=answers, flush=True)


def _start(main: Any, ranks: int, arguments: list[str], environment: dict[str, str], log: str) -> list[int]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _be(rank, ranks, port, main, arguments, environment, log)
        pids.append(pid)
    return pids


def _be(
    rank: int, ranks: int, port: int, main: Any, arguments: list[str], environment: dict[str, str], log: str
) -> None:
    """Never returns."""
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        places = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ.update({**{name: str(value) for name, value in places.items()}, **environment})
        if "NAN" in environment:
            from tests.faults.injection import injected

            for spec in environment["NAN"].split():
                setattr(*injected(spec))
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _wait(pids: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] == -signal.SIGKILL:
                    deadline = 0.0
                elif codes[pid] != 0:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            for pid in [pid for pid in pids if pid not in codes]:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    _serve()
