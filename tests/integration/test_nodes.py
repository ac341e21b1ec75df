"""Tests starts on several nodes, which are simulated on this machine: Slurm, a hostfile, docker compose.

The commands of the clusters (srun, scontrol, pdsh, ssh) are stubs in tests/integration/cluster_stubs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.cluster.environment import check_arguments, lines
from ppo_ds.errors import UserError
from tests.integration.launching import BIN, ROOT, TIMEOUT, run
from tests.integration.test_launchers import metrics
from tests.support.environment import environment
from tests.support.ports import reserved_port

CLUSTER = ROOT / "launch" / "cluster"
STUBS = ROOT / "tests" / "integration" / "cluster_stubs"


def stubbed(folder: Path, **more: str) -> dict[str, str]:
    """Returns an environment in which the stubs are found before any real command of their names."""
    path = f"{STUBS}:{BIN}:{os.environ['PATH']}"
    return environment(PATH=path, STUBS_FOLDER=str(folder), HOME=str(folder), **more)


def small(run_dir: Path, **keys: object) -> list[str]:
    """Returns the arguments of a tiny training, whose third step requests a stop once."""
    prepare = {"max_operand": 9, "heldout": 10, "validation": 10, "target_accuracy": 0.1}
    return [
        "+experiment=quickstart",
        *(f"prepare.{name}={value}" for name, value in prepare.items()),
        "rollout.prompts_per_step=16",
        "algo.minibatch_size=8",
        "eval.every=null",
        "reward=function",
        f"reward.path={ROOT}/tests/integration/stopping_reward.py:score",
        f"run.dir={run_dir}",
        *(f"{name}={value}" for name, value in keys.items()),
    ]


SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_SUBMIT_DIR": str(ROOT)}
# the Slurm script, which writes its process id to a file
BATCH = ["bash", "-c", 'echo $$ >"$STUBS_FOLDER/batch"; exec "$0" "$@"', str(CLUSTER / "slurm.sh")]
RANK = """#!/usr/bin/env bash
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT: $1 $2" \\
    >"$STUBS_FOLDER/rank$RANK"
trap 'exit 143' USR1
[ "$END" = now ] && exit "$CODE"
touch "$STUBS_FOLDER/ready$RANK"
if [ "$RANK" = 0 ]; then
    until [ "$(ls "$STUBS_FOLDER"/ready* | wc -l)" = 4 ]; do sleep 0.05; done
    kill -USR1 "$(cat "$STUBS_FOLDER/batch")"
fi
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("end", "code", "queued"),
    [("signal", 143, True), ("now", 143, False), ("now", 1, False), ("now", 0, False)],
)
def test_the_slurm_script_starts_one_task_per_rank(end: str, code: int, queued: bool, tmp_path: Path) -> None:
    """A script stands in for python; a job is queued again only if the script has got SIGUSR1."""
    (tmp_path / "python").write_text(RANK)
    (tmp_path / "python").chmod(0o755)
    env = stubbed(tmp_path, **SLURM, SLURM_NTASKS="4", SLURM_NTASKS_PER_NODE="2", END=end, CODE=str(code))
    env["SLURM_CPUS_PER_TASK"] = "6"
    done = run([*BATCH, "a b", "c"], tmp_path, env | {"PATH": f"{tmp_path}:{env['PATH']}"})
    assert done.returncode == code and (tmp_path / "requeued").exists() == queued, done.stderr
    assert "--cpus-per-task=6" in (tmp_path / "srun_options").read_text().split("\n")
    for rank in range(4):
        said = (tmp_path / f"rank{rank}").read_text()
        assert said == f"{rank} of 4, {rank % 2} of 2 at 0.0.0.0:20077: launch/train.py a b\n"


@pytest.mark.slow
def test_a_slurm_job_is_queued_again_and_resumes(tmp_path: Path) -> None:
    """Two nodes with one rank each use the address of the first node, as on a cluster."""
    network = {"MASTER_PORT": str(reserved_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env = stubbed(tmp_path, **SLURM, SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="1", **network)
    command = [*BATCH, *small(tmp_path / "run", **{"run.steps": 5})]
    first = run(command, tmp_path, env)
    assert first.returncode == 143, first.stdout + first.stderr
    assert (tmp_path / "requeued").read_text() == "77\n"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"] == "signal"
    stopped_at = len(metrics(tmp_path / "run"))
    assert stopped_at < 5 and "2 ranks" in first.stdout
    again = run(command, tmp_path, env | {"SLURM_RESTART_COUNT": "1"})
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert (tmp_path / "requeued").read_text() == "77\n"  # a run that is done is not queued again


@pytest.mark.slow
def test_variables_and_keys_arrive_on_the_nodes_of_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("MINE=1\n")
    (tmp_path / "keys.sh").write_text("export WANDB_API_KEY=0123456789abcdef\n")
    (tmp_path / "keys.sh").chmod(0o600)
    passed = {
        "HF_HOME": "/shared/hf",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "WANDB_PROJECT": "two words",
        "HF_TOKEN_PATH": "/shared/token",
    }
    keys = {"HF_TOKEN": "hf_ABCDEFGHIJKLMNOPQRST", "PPO_DS_NODE_SCRIPT": str(tmp_path / "keys.sh")}
    env = stubbed(tmp_path, **passed, **keys)
    command = [str(CLUSTER / "deepspeed.sh"), str(CLUSTER / "hostfile"), "+experiment=rlhf"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    for node in ("node-0", "node-1"):
        items = (tmp_path / node).read_text().split("\0")
        found = dict(item.split("=", 1) for item in items if item)
        assert passed.items() <= found.items() and found["MINE"] == "1"
        assert found["WANDB_API_KEY"] == "0123456789abcdef" and "HF_TOKEN" not in found
    arguments = (tmp_path / "arguments").read_text()
    assert "launch/train.py" in arguments and "+experiment=rlhf" in arguments
    for key in ("hf_ABCDEFGHIJKLMNOPQRST", "0123456789abcdef"):
        assert key not in arguments + done.stdout + done.stderr


def test_variables_that_ranks_need_are_passed_on_and_keys_are_not() -> None:
    given = {
        "HF_HOME": "/cache",
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "0123456789",
        "HF_TOKEN": "hf_abc",
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_HOME": "/cuda",
        "HTTP_PROXY": "http://me:secret-word@proxy",
        "PATH": "/bin",
        "DS_ENV_FILE": "/x",
        "FI_PROVIDER": "efa",
        "LD_LIBRARY_PATH": "/opt/ofi/lib",
        "VLLM_CACHE_ROOT": "/vllm",
    }
    passed = ["CUDA_HOME=/cuda", "FI_PROVIDER=efa", "HF_HOME=/cache", "LD_LIBRARY_PATH=/opt/ofi/lib"]
    passed += ["VLLM_CACHE_ROOT=/vllm", "WANDB_MODE=offline"]
    assert lines(given) == [f"{line}\n" for line in passed]


@pytest.mark.parametrize("name", ["HF_HOME", "PYTHONPATH", "UCX_TLS", "NCCL_DEBUG_FILE", "MLFLOW_RUN_ID"])
@pytest.mark.parametrize("value", ["$HOME/x", "a`b`", 'a"b', "a\\b", "a\nHF_X=b", "run-%h", "100%%"])
def test_a_value_that_a_node_would_change_is_refused(name: str, value: str) -> None:
    """DeepSpeed passes on some variables by itself, whether they are in the file or not."""
    with pytest.raises(UserError, match=rf"^{name}: the nodes would change its value"):
        lines({name: value})
    assert lines({"PATH": value, "SHELL_X": value}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("MLFLOW_TRACKING_PASSWORD", "0123456789"), ("MLFLOW_TRACKING_URI", "http://me:secret-word@host")],
)
def test_a_key_that_deepspeed_would_pass_on_by_itself_is_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"^{name}: pdsh would show this key") as caught:
        lines({name: value})
    assert value not in str(caught.value)


def shell_of_a_node(arguments: list[str]) -> list[str]:
    """Returns the arguments that a program on a node gets, from DeepSpeed through pdsh and a shell.

    As pdsh 2.34 does in pipecmd.c, %h, %u and %n are replaced by the host, the user and the node's number,
    and %% by %.
    """
    from deepspeed.launcher.multinode_runner import PDSHRunner

    runner = PDSHRunner(argparse.Namespace(user_args=arguments, user_script="x", launcher_args=""), "")
    made = {"%h": "node-0", "%u": "root", "%n": "0", "%%": "%"}
    passed = re.sub("%[hun%]", lambda found: made[found[0]], " ".join(runner.user_arguments))
    command = f"printf '%s\\0' {passed}"
    done = subprocess.run(["bash", "-c", command], cwd="/", capture_output=True, text=True, check=False)
    return done.stdout.split("\0")[:-1]


UNSAFE = (
    *("x=$HOME", "x=`id`", "x=$(id)", "x=a;id", "x=a&id", "x=a|id", "x=a>/dev/null", "x=(a)", "x='a'"),
    *(
        "x=100%host",
        "x=a %u",
        "run.name=%n",
        "x=%%",
        "#x",
        'x=["a"]',
        "x={a,b}",
        "x=a\\b",
        "x=a\nid",
        "x=a\tb",
        "x=a $HOME",
        "x=a `id`",
        "x=a \\\\b",
    ),
)


@pytest.mark.parametrize("argument", UNSAFE)
def test_an_argument_that_the_shell_of_a_node_would_change_is_refused(argument: str) -> None:
    assert shell_of_a_node([argument]) != [argument]
    with pytest.raises(UserError, match="the shells of the nodes would change it; write the key into a file"):
        check_arguments([argument])


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh")
def test_pdsh_changes_what_the_tests_say_that_it_changes(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", PDSH_RCMD_TYPE="ssh")
    arguments = ["a%hb", "%n", "100%%", "%g?", "x y", "[1,a]"]
    done = subprocess.run(["pdsh", "-N", "-w", "node-0", *arguments], env=env, capture_output=True, text=True)
    given = done.stdout.strip().split("|")[:-1]
    assert given[-len(arguments) :] == ["anode-0b", "0", "100%", "%g?", "x y", "[1,a]"], done.stderr


def test_other_arguments_arrive_on_a_node() -> None:
    arguments = ["+experiment=rlhf", "~algo.kl", "x=[1,a]", "x=a b", "model@actor.model=qwen", "--help"]
    arguments += ['x=say "a"; it\'s (a) {b} & c > d | e', "x=/a/*.jsonl", "x=é→漢", "x=a:b,c@d#e^f%g?"]
    check_arguments(arguments)
    assert shell_of_a_node(arguments) == arguments


def test_the_script_ends_with_one_line_before_a_node_gets_the_argument(tmp_path: Path) -> None:
    command = [
        str(CLUSTER / "deepspeed.sh"),
        str(CLUSTER / "hostfile"),
        f"x=a;touch {tmp_path}/run",
        "x=a;id",
    ]
    done = subprocess.run(command, cwd=ROOT, env=stubbed(tmp_path), capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "arguments").exists()
    assert done.stderr.startswith("error: x=a;id: the shells of the nodes would change it")


def compose() -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / "compose.yaml").read_text())


def test_the_compose_file_starts_the_nodes_of_the_hostfile() -> None:
    from deepspeed.launcher.runner import fetch_hostfile, parse_args

    nodes = fetch_hostfile(str(CLUSTER / "hostfile"))
    assert dict(nodes) == {"node-0": 8, "node-1": 8}
    services = compose()["services"]
    assert list(services) == list(nodes)
    ids: list[str] = []
    for rank, (name, service) in enumerate(services.items()):
        given = parse_args([*service["environment"]["DEEPSPEED_ARGS"].split(), "launch/train.py"])
        assert (given.no_ssh, given.node_rank, given.master_addr) == (True, rank, "node-0")
        assert ROOT / given.hostfile == CLUSTER / "hostfile"
        assert service["hostname"] == name and service["networks"] == ["ranks"] and "ports" not in service
        assert service["image"] == "ppo_ds" and "entrypoint" not in service
        assert service["user"].startswith("${RUN_AS:?")  # the image's user cannot write to outputs/
        outputs, cache = service["volumes"]
        assert (CLUSTER / outputs.split(":")[0]).resolve() == ROOT / "outputs"  # shared by all nodes
        assert cache == f"cache-{rank}:/cache"  # of its own
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        ids += devices["device_ids"]
        assert len(devices["device_ids"]) == nodes[name]
    assert ids == [str(i) for i in range(16)]
    assert set(compose()["networks"]) == {"ranks"}


@pytest.mark.slow
def test_the_containers_of_the_compose_file_train_together(tmp_path: Path) -> None:
    """The entry point of each container runs on this machine, with one slot per node."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(re.sub("slots=8", "slots=1", (CLUSTER / "hostfile").read_text()))
    port = reserved_port()
    env = stubbed(tmp_path, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    (tmp_path / "asked").touch()  # no stop
    processes = []
    for service in compose()["services"].values():
        options = service["environment"]["DEEPSPEED_ARGS"]
        options = options.replace("launch/cluster/hostfile", str(hostfile)).replace("node-0", "0.0.0.0")
        processes.append(
            subprocess.Popen(
                [str(ROOT / "launch" / "docker-entrypoint.sh"), *small(tmp_path / "run", **{"run.steps": 2})],
                env=env | {"DEEPSPEED_ARGS": f"{options} --master_port {port}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.terminate()  # the entry point then ends its ranks
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    assert "2 ranks" in outputs[0]


def test_scripts_are_valid_and_stop_early_enough() -> None:
    for script in CLUSTER.glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK)
    slurm = (CLUSTER / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", slurm, re.MULTILINE))
    # "B:" sends the signal to the script, so that it knows why the ranks ended
    assert re.fullmatch(r"B:USR1@\d+", options["signal"]) and "requeue" in options
    assert options["ntasks-per-node"] == options["gpus-per-node"]
