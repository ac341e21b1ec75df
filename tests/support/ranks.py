"""Starts process groups of ranks, forked from one process that has imported torch, deepspeed and ppo_ds once.

    with RankServer(folder) as server:
        group = server.start("tests.engine.switch_worker:main", 2, str(folder), "all")
        os.kill(group.pids[1], signal.SIGKILL)
        assert server.wait(group) == [-9, -9]

The target is a function without parameters, which reads its arguments from sys.argv and returns an exit code
or None. Its module is imported in each rank after the fork. The ranks of a group form a process group of the
operating system, so that a time limit also ends all processes that the ranks have started. No process
outlives the ``with`` block or the process that runs it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.environment import ROOT, environment
from tests.support.ports import reserved_port

LIMIT = 900.0  # seconds after which all ranks of a group are killed


@dataclass
class RankGroup:
    """Holds the process ids of started ranks, by rank, and the file with their output."""

    pids: list[int]
    log: Path
    codes: dict[int, int] = field(default_factory=dict)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class RankServer:
    """Starts the server process and sends it the requests of the tests."""

    def __init__(self, folder: Path, **environment: str):
        """Initializes the server, which starts with the variables of ``environment``."""
        self._folder, self._started, self._environment = folder, 0, environment

    def __enter__(self) -> RankServer:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks"],
            env=environment(
                PYTHONPATH=str(ROOT),
                OMP_NUM_THREADS="1",
                TOKENIZERS_PARALLELISM="false",
                TRANSFORMERS_VERBOSITY="error",
                **self._environment,
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._folder / "server.log").open("w"),
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()  # the server ends all groups
        try:
            self._server.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)

    def start(
        self,
        target: str,
        ranks: int,
        *arguments: str,
        nodes: int = 1,
        log: Path | None = None,
        **environment: str,
    ) -> RankGroup:
        """Starts ``target``, given as "module:function", on ``ranks`` ranks.

        With ``nodes``, the local ranks are those of a launch on this number of nodes. The ranks run on this
        machine and use the loopback interface.
        """
        self._started += 1
        log = log or self._folder / f"group_{self._started:03d}.log"
        pids = self._ask(
            do="start",
            target=target,
            ranks=ranks,
            per_node=ranks // nodes,
            arguments=arguments,
            environment=environment,
            log=str(log),
        )
        return RankGroup(pids, log)

    def wait(self, group: RankGroup, *, limit: float = LIMIT, grace: float | None = 15.0) -> list[int]:
        """Waits for all ranks and returns their exit codes; a rank ended by signal N has the exit code -N.

        Args:
            limit: The seconds after which all ranks are killed.
            grace: The seconds after which the other ranks are killed if one has failed, as under a launcher.
                If that rank was ended by SIGKILL, they are killed at once. None: only ``limit`` applies.
        """
        deadline = time.monotonic() + limit
        while len(group.codes) < len(group.pids):
            for pid, code in self._ask(do="poll", pids=[p for p in group.pids if p not in group.codes]):
                group.codes[pid] = code
                if code != 0 and grace is not None:
                    left = 0.0 if code == -signal.SIGKILL else grace
                    deadline = min(deadline, time.monotonic() + left)
            if time.monotonic() > deadline:
                self._ask(do="kill", leader=group.pids[0])
                deadline = float("inf")
            time.sleep(0.01)
        self._ask(do="kill", leader=group.pids[0])  # ends processes that the ranks left running
        return [group.codes[pid] for pid in group.pids]

    def run(
        self,
        target: str,
        ranks: int,
        *arguments: str,
        nodes: int = 1,
        limit: float = LIMIT,
        **environment: str,
    ) -> tuple[list[int], str]:
        """Runs a target until all ranks have ended, and returns their exit codes and their output."""
        group = self.start(target, ranks, *arguments, nodes=nodes, **environment)
        return self.wait(group, limit=limit), group.output()

    def check(self, target: str, ranks: int, *arguments: str, nodes: int = 1, limit: float = LIMIT) -> None:
        """Runs a target and raises AssertionError unless all ranks end with exit code 0."""
        codes, output = self.run(target, ranks, *arguments, nodes=nodes, limit=limit)
        assert codes == [0] * ranks, f"{target} on {ranks} rank(s): {codes}\n{output[-6000:]}"

    def _ask(self, **request: Any) -> Any:
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, (self._folder / "server.log").read_text()[-6000:]
        return json.loads(answer)


# -- the server's side, in a separate process -----------------------------------------------------


def serve() -> None:
    """Answers requests until the client has closed stdin, then ends all groups."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_once()
    leaders: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        match request.pop("do"):
            case "start":
                answer: Any = _start(**request)
                leaders.add(answer[0])
            case "poll":
                answer = _poll(**request)
            case "kill":
                _kill(**request)
                leaders.discard(request["leader"])
                answer = None
        print(json.dumps(answer), file=answers, flush=True)
    for leader in leaders:
        _kill(leader)


# libraries that take long to import, and modules that import others
IMPORTED = (
    *("launch.train", "hydra._internal.hydra", "transformers.models.llama.modeling_llama", "peft"),
    *("ppo_ds.assemble.run", "ppo_ds.assemble.ppo", "ppo_ds.run.final_report"),
    "deepspeed.runtime.zero.muon.muon_optimizer",
)


def _import_once() -> None:
    import launch.process

    launch.process.prepare_environment(verbose=False)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a rank would copy the pages of all imported objects


def _start(
    target: str, ranks: int, per_node: int, arguments: list[str], environment: dict[str, str], log: str
) -> list[int]:
    port, pids = reserved_port(), []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            launched = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            launched |= {"LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
            os.environ.update({name: str(value) for name, value in launched.items()} | environment)
            _become(target, arguments, log)
        pids.append(pid)
        # The parent and the child both set the process group, because either may run first.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pids[0])
    return pids


def _become(target: str, arguments: list[str], log: str) -> None:
    """Runs the target in this process and then ends the process."""
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        module, _, function = target.partition(":")
        sys.argv = [module, *arguments]
        code = getattr(importlib.import_module(module), function)() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        # A normal exit of an interpreter that has created dozens of engines can abort.
        os._exit(code)


def _poll(pids: list[int]) -> list[tuple[int, int]]:
    """Returns (process id, exit code) of the processes that have ended."""
    ended = [os.waitpid(pid, os.WNOHANG) for pid in pids]
    return [(pid, os.waitstatus_to_exitcode(status)) for pid, status in ended if pid]


def _kill(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    serve()
