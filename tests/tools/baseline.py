"""Records the numbers of many short training runs, and compares other code with the recording.

    python tests/tools/baseline.py record FILE [-j 2] [--only NAME ...]
    python tests/tools/baseline.py compare FILE [-j 2] [--only NAME ...]
    python tests/tools/baseline.py list

A change of structure must not change a number. ``record`` runs the quickstart, every preset of ``conf/algo``
and some runs of other paths (ZeRO-3, LoRA, resume, ...) on a tiny model. It writes to FILE every metric of
every step and a SHA-256 of every tensor that the runs save. ``compare`` repeats the runs of FILE with the
code of this working tree and prints one line per run: identical, or the first difference. It exits with 1 if
a run differs or fails.

All runs are in fp32 with one thread and fixed seeds, so that equal code gives equal bits on the same machine.
Processors and library versions round differently: record and compare on one machine with the same packages.

The script imports nothing of the project. It uses only the command line, config keys, and files of the run
directory, which rarely change with the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 900  # maximum seconds of one launch; an idle machine needs about ten
UNCOMPARED = ("time/", "perf/", "mem/", "health/rank_time_spread_s")  # metrics that differ between equal runs
# {start}: the folder of the shared tiny model and its data, {run}: the run directory, {here}: this file.
# The learning rate and the warm-ups are those that the quickstart had when the first record was made.
COMMON = """+experiment=quickstart run.dir={run} run.seed=0 run.threads=1 run.timeout_minutes=5
    actor.optim.lr=6e-4 actor.optim.warmup_steps=null critic.optim.warmup_steps=null
"""
# 3 steps of 32 samples in 2 minibatches, each of several micro-batches. `prepare` takes a second.
TINY = """
    prepare.dir={start} prepare.max_operand=9 prepare.heldout=8 prepare.validation=20
    prepare.hidden_size=32 prepare.target_accuracy=0.4 prepare.learning_rate=3e-3
    actor.model.path={start}/model data.path={start}/train.jsonl data.eval_path={start}/heldout.jsonl
    reward=function reward.path={here}:score zero=stage2
    run.steps=3 rollout.prompts_per_step=8 rollout.samples_per_prompt=4 algo.minibatch_size=16
    memory.rollout_tokens=200 memory.score_tokens=128 memory.train_tokens=64
    eval.every=null checkpoint.every=0
"""
# a reward of two parts for the preset gdpo, in place of the reward of TINY
PARTS = """reward=weighted ~reward.path
    reward@reward.parts.right.reward=sums reward@reward.parts.short.reward=length
    reward.parts.short.reward.shortest=1 reward.parts.short.reward.longest=2"""
SHARD_ALL = "deepspeed.zero_optimization.stage3_param_persistence_threshold=0"  # shards tiny weights too
ADAPTIVE_KL = "algo.kl.controller=adaptive algo.kl.target=0.01 algo.kl.horizon=200"
SAMPLING = "sampling.temperature=0.7 sampling.top_k=6 sampling.top_p=0.9 sampling.min_new_tokens=2"
NARROW = "algo.rollout_is.low=1 algo.rollout_is.high=1"  # rounding errors suffice to cross these bounds
# Further runs besides the presets -> the arguments that each adds to COMMON and TINY.
OTHERS = {
    # engines and models
    "zero0": "zero=stage0",
    "zero1": "zero=stage1",
    "zero3_2_ranks": f"zero=stage3 actor.{SHARD_ALL} critic.{SHARD_ALL}",
    "zero3_layerwise": f"zero=stage3 actor.{SHARD_ALL} actor.zero.generation_gather=layers",
    "lora": "actor.lora.rank=4 critic.lora.rank=4 actor.lora.lr=null critic.lora.lr=null",
    "share_trunk": "critic.share_trunk=true",
    "ema_ptx": """actor.ema.decay=0.9 actor.ema.evaluate=true eval.every=1
        algo.ptx.coef=0.5 data.ptx_path={start}/train.jsonl""",
    "packed": "memory.layout=packed",
    "padded": "memory.layout=padded",
    "resumed": f"checkpoint.every=1 actor.ema.decay=0.9 {ADAPTIVE_KL}",
    # rollouts
    "backend_hf": "rollout.backend=hf",
    "backend_static": "rollout.backend=static",
    "sampling_hf": f"rollout.backend=hf {SAMPLING}",
    "sampling_static": f"rollout.backend=static {SAMPLING}",
    "stop_texts": "sampling.stop=['1','+']",
    "dynamic_sampling": """algo=dapo algo.dynamic_sampling.max_rounds=3
        reward.path=ppo_ds.examples.sums:reward""",
    # the algorithm
    "one_update": "algo=grpo algo.minibatch_size=null",  # old log-probs come from the update itself
    "kl_measured_again": f"algo.kl.after_update=true {ADAPTIVE_KL}",
    "kl_loss": "algo.kl.place=loss algo.kl.estimator=k3+",
    "critic_first": "algo.value.warmup_steps=1 algo.value.pretrain_rollouts=1",
    "critic_lambda": "algo.gae.lam_critic=1 algo.gae.bootstrap_truncated=true algo.advantage.whiten=group",
    "whiten_minibatch": "algo.advantage.whiten=minibatch algo.entropy.coef=0.01 algo.target_kl=0.001",
    "opo": "algo.advantage.estimator=opo",
    "cispo": "algo.policy.loss=cispo",
    "policy_reinforce": "algo.policy.loss=reinforce algo.advantage.estimator=reinforce",
    "tis": "algo.rollout_is.kind=tis algo.rollout_is.low=0 algo.rollout_is.high=0.5",
    "icepop": f"algo.rollout_is.kind=icepop {NARROW}",
    "seq_mask_tis": f"algo.rollout_is.kind=seq_mask_tis {NARROW}",
    "reward_shaping": """algo.reward_shaping.normalize=running algo.reward_shaping.missing_eos=subtract
        algo.reward_shaping.overlong_buffer=0.5 algo.reward_shaping.length_penalty=0.01""",
}
ON_TWO_RANKS = {"quickstart", "zero3_2_ranks", "dynamic_sampling"}
STOP_AT = {"resumed": 2}  # the step after which a run stops, to be resumed by a second launch

Record = dict[str, Any]  # {"metrics": [{name: value as text}, one per step], "tensors": {"file:name": hash}}


def score(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Scores a right answer with 1, and any other by its digits, so that scores differ within a group."""
    scores = []
    for text, row in zip(responses, rows, strict=True):
        digits = sum(int(character) for character in text if character.isdigit())
        scores.append(1.0 if text == row["answer"] else digits / 40 - len(text) / 20)
    return scores


def cases() -> dict[str, str]:
    """Returns the arguments of launch/train.py for each run: the quickstart, every preset, the others."""
    presets = sorted(file.stem for file in (ROOT / "conf" / "algo").glob("*.yaml"))
    added = {preset: f"algo={preset}" for preset in presets} | OTHERS
    added["vapo"] += " algo.value.pretrain_rollouts=1"
    added["gdpo"] += f" {PARTS}"
    quickstart = {"quickstart": f"{COMMON} run.steps=10 eval.every=5"}
    return quickstart | {name: f"{COMMON} {TINY} {arguments}" for name, arguments in added.items()}


# -- running ---------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Returns this process's environment without a GPU, access to the Hub or the variables of launchers."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    own = {key: value for key, value in os.environ.items() if key not in launcher}
    fixed = {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return own | fixed | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class RunFailed(Exception):
    """Raised for a run that did not end with exit code 0."""


def run(name: str, arguments: str, work: Path) -> Record:
    """Runs one case under the folder ``work`` and returns its record; raises RunFailed."""
    places = {"run": work / name, "start": work / "start", "here": Path(__file__).resolve()}
    words = [word.format_map(places) for word in arguments.split()]
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *words]
    if name in ON_TWO_RANKS:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launches = [command]
    if name in STOP_AT:
        launches.insert(0, [*command, f"run.stop_at_step={STOP_AT[name]}"])
    log = work / f"{name}.log"
    for launch in launches:
        with log.open("w") as output:  # not a pipe, which stays open while any child runs
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            try:
                done = subprocess.run(launch, cwd=work, env=environment(), timeout=TIMEOUT, **streams)
            except subprocess.TimeoutExpired:
                raise RunFailed(f"no end after {TIMEOUT} s; its output is in {log}") from None
        if done.returncode:
            lines = [line.strip() for line in log.read_text().splitlines() if line.strip()] or ["no output"]
            reason = next((line for line in lines if line.startswith("error:")), lines[-1])
            raise RunFailed(f"exit code {done.returncode}: {reason[:200]}; its output is in {log}")
    return read_record(work / name)


Outcome = tuple[str, Record | RunFailed, float]  # name, result, seconds


def run_all(chosen: dict[str, str], work: Path, jobs: int) -> Iterator[Outcome]:
    """Runs the cases, ``jobs`` at a time, and yields their outcomes in order.

    The first case with the shared tiny model runs before the others, because its ``prepare`` makes the model.
    """

    def timed(name: str) -> Outcome:
        begin = time.monotonic()
        try:
            result: Record | RunFailed = run(name, chosen[name], work)
        except RunFailed as failure:
            result = failure
        return name, result, time.monotonic() - begin

    maker = next((name for name, arguments in chosen.items() if "{start}" in arguments), None)
    if maker is not None:
        yield timed(maker)
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(timed, [name for name in chosen if name != maker])


# -- records ---------------------------------------------------------------------------------------


def read_record(folder: Path) -> Record:
    """Reads the metrics of every step and the hash of every tensor in a run directory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tensors = {}
    for file in sorted(folder.rglob("*.safetensors")):
        for name, digest in tensor_hashes(file):
            tensors[f"{file.relative_to(folder)}:{name}"] = digest
    return {"metrics": [compared(line) for line in lines], "tensors": tensors}


def compared(line: dict[str, Any]) -> dict[str, str]:
    """Returns the metrics that are the same in equal runs, with floats in hexadecimal, which is exact."""
    kept = {key: value for key, value in line.items() if key != "time" and not key.startswith(UNCOMPARED)}
    return {key: value.hex() if isinstance(value, float) else repr(value) for key, value in kept.items()}


def tensor_hashes(file: Path) -> Iterator[tuple[str, str]]:
    """Yields the name of each tensor in a safetensors file and the SHA-256 of its type, shape and bytes."""
    content = memoryview(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, entry in sorted(json.loads(bytes(content[8:begin])).items()):
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            digest = hashlib.sha256(f"{entry['dtype']}{entry['shape']}".encode())
            digest.update(content[begin + first : begin + end])
            yield name, digest.hexdigest()


def difference(recorded: Record, found: Record) -> str | None:
    """Returns the first difference in one line, metrics before tensors, or None for equal records."""
    before, after = recorded["metrics"], found["metrics"]
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        names = [name for name in [*old, *(set(new) - set(old))] if old.get(name) != new.get(name)]
        if names:
            others = f" (and {len(names) - 1} more of this step)" if names[1:] else ""
            was, now = shown(old.get(names[0])), shown(new.get(names[0]))
            return f"step {index + 1} {names[0]}: {was} -> {now}{others}"
    if len(before) != len(after):
        return f"{len(before)} steps -> {len(after)} steps"
    old, new = recorded["tensors"], found["tensors"]
    names = [name for name in [*old, *sorted(set(new) - set(old))] if old.get(name) != new.get(name)]
    if not names:
        return None
    what = "missing" if names[0] not in new else "new" if names[0] not in old else "other content"
    return f"tensor {names[0]}: {what} ({len(names)} of {len(set(old) | set(new))} tensors differ)"


def shown(value: str | None) -> str:
    """Returns a recorded value in decimal notation."""
    if value is None:
        return "absent"
    return repr(float.fromhex(value)) if "0x" in value else value


def machine() -> dict[str, str]:
    """Returns the processor and the versions on which the last bits of the numbers depend."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
    processor = cpu[0].partition(":")[2].strip() if cpu else platform.machine()
    return {"processor": processor, "python": platform.python_version(), **packages}


# -- commands --------------------------------------------------------------------------------------


def record(file: Path, chosen: dict[str, str], work: Path, jobs: int) -> bool:
    """Runs the cases and writes their records to ``file``; returns whether all runs ended well."""
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    content: dict[str, Any] = {"commit": commit, "machine": machine(), "runs": {}}
    failed = False
    for name, result, seconds in run_all(chosen, work, jobs):
        if isinstance(result, RunFailed):
            failed = True
            print(f"{name:20} failed: {result}", flush=True)
            continue
        steps, tensors = len(result["metrics"]), len(result["tensors"])
        content["runs"][name] = result
        print(f"{name:20} recorded: {steps} steps, {tensors} tensors, {seconds:.0f} s", flush=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
    return not failed


def compare(content: dict[str, Any], chosen: dict[str, str], work: Path, jobs: int) -> bool:
    """Repeats recorded runs and prints one line for each; returns whether all are identical."""
    here = machine()
    for key, value in content["machine"].items():
        if here[key] != value:
            print(f"warning: recorded with {key} {value}, this is {here[key]}: the last bits may differ")
    same = True
    for name, result, seconds in run_all(chosen, work, jobs):
        if isinstance(result, RunFailed):
            verdict = f"failed: {result}"
        else:
            found = difference(content["runs"][name], result)
            verdict = f"differs: {found}" if found else f"identical ({seconds:.0f} s)"
        same = same and verdict.startswith("identical")
        print(f"{name:20} {verdict}", flush=True)
    return same


def main(argv: list[str]) -> int:
    verbatim = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=verbatim)
    parser.add_argument("command", choices=["record", "compare", "list"])
    parser.add_argument("file", type=Path, nargs="?", help="the recording")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these runs alone")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    options = parser.parse_args(argv)
    available = cases()
    if options.command == "list":
        print("\n".join(available))
        return 0
    if options.file is None:
        parser.error("FILE is missing: where the recording is")
    content = json.loads(options.file.read_text()) if options.command == "compare" else {"runs": available}
    names = options.only or list(content["runs"])
    if unknown := [name for name in names if name not in content["runs"]]:
        parser.error(f"--only: no such run: {', '.join(unknown)}; there are {', '.join(content['runs'])}")

    chosen = {name: available[name] for name in names if name in available}
    gone = [name for name in names if name not in available]
    for name in gone:
        print(f"{name:20} failed: this code has no such preset")
    begin, work = time.monotonic(), Path(tempfile.mkdtemp(prefix="baseline-"))
    if options.command == "record":
        passed = record(options.file, chosen, work, options.jobs)
    else:
        passed = compare(content, chosen, work, options.jobs)
    passed = passed and not gone
    outcome = "all passed" if passed else f"not all passed; the run directories are in {work}"
    print(f"{len(chosen)} runs in {time.monotonic() - begin:.0f} s: {outcome}")
    if passed:
        shutil.rmtree(work)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
