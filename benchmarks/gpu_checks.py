"""Checks properties on GPUs that tests on a CPU cannot show. No network is needed.

    python benchmarks/gpu_checks.py --list
    python benchmarks/gpu_checks.py correctness speed vllm    # the first hour with one GPU
    python benchmarks/gpu_checks.py two vllm_two              # with two GPUs
    python benchmarks/gpu_checks.py eight                     # with eight
    python benchmarks/gpu_checks.py gradients growth          # single checks: at most half an hour each

A check runs the benchmark or the trainer one or several times and compares the runs. Each run has a time
limit; --list shows their sums. Logs, metrics and results.json are written to --out (default:
outputs/gpu_checks). results.json also holds a row for the table of docs/tested.md for each check.

With --inject, the defects that a check must detect are made as well, one after the other: the check must then
fail. With --cpu, the checks run with tiny sizes on the CPU, those of eight GPUs on two and four ranks.

Exit code 0: no check failed, and every fault was detected; 1: otherwise; 2: a wrong argument, too few GPUs,
or all checks were skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"),
]

from benchmarks.checks.one_gpu import one_gpu_checks
from benchmarks.checks.runs import Check, Result, execute
from benchmarks.checks.several_gpus import eight_gpu_checks, two_gpu_checks
from benchmarks.checks.with_vllm import vllm_checks


def all_checks(tiny: bool = False) -> dict[str, Check]:
    """Returns the checks by name, in the order in which they run; ``tiny`` uses dry workloads."""
    return one_gpu_checks(tiny) | vllm_checks(tiny) | two_gpu_checks(tiny) | eight_gpu_checks(tiny)


CHECKS = all_checks()


def main(argv: list[str]) -> int:
    blocks = list(dict.fromkeys(check.block for check in CHECKS.values()))
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu_checks.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="BLOCK_OR_CHECK")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_checks"), help="folder of the results")
    parser.add_argument("--list", action="store_true", help="list the checks with their time limits")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU, to test this script")
    parser.add_argument("--inject", action="store_true", help="also make the faults that must be detected")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in (*blocks, *CHECKS)]:
        parser.error(f"{unknown[0]}: no such block or check; choose from {', '.join((*blocks, *CHECKS))}")
    if args.list or not args.names:
        print("\n".join(_listing(blocks)))
        return 0
    chosen = {
        name: check
        for name, check in all_checks(tiny=args.cpu).items()
        if {name, check.block} & set(args.names)
    }
    if problem := None if args.cpu else _missing_gpus(chosen):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    passed = []
    for name, check in chosen.items():
        passed.append(perform(name, check, args.out.resolve(), args.cpu, args.inject))
    counts = {
        word: passed.count(value) for word, value in (("passed", True), ("FAILED", False), ("skipped", None))
    }
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 1 if counts["FAILED"] else 0 if counts["passed"] else 2


def _missing_gpus(chosen: dict[str, Check]) -> str | None:
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name, needed = max(((name, check.gpus) for name, check in chosen.items()), key=lambda pair: pair[1])
    if not found:
        return "torch finds no GPU: run it on a GPU node, or with --cpu to test the script"
    return f"{name} needs {needed} GPUs, torch finds {found}" if found < needed else None


def _listing(blocks: Sequence[str]) -> list[str]:
    lines = []
    for block in blocks:
        checks = {name: check for name, check in CHECKS.items() if check.block == block}
        minutes, gpus = (
            f(getattr(check, key) for check in checks.values())
            for f, key in ((sum, "minutes"), (max, "gpus"))
        )
        lines.append(f"{block}: {gpus} GPU(s), at most {minutes:g} minutes")
        lines += [f"  {name:<14} {check.minutes:>4g} min  {check.question}" for name, check in checks.items()]
    return lines


def perform(name: str, check: Check, out: Path, on_cpu: bool, inject: bool = False) -> bool | None:
    """Runs a check, prints and records its result, and returns whether it passed; None: it was skipped.

    With ``inject``, a check passes only if it also detects its faults.
    """
    reason = check.only_on_gpu if on_cpu else None
    if check.needs and find_spec(check.needs) is None:
        reason = f"{check.needs} is not installed"
    if reason:
        print(f"skipped {name}: {reason}", flush=True)
        record(out, name, {"passed": None, "shown": f"skipped: {reason}"}, on_cpu)
        return None
    results: dict[str, Result] = {}
    for run in check.runs:
        results[run.name] = execute(run, out, on_cpu)
        (out / f"{name}_{run.name}.log").write_text(results[run.name].log, encoding="utf-8")
    passed, shown = check.verdict(results)
    codes = ", ".join(f"{run} {result.code} after {result.seconds:.0f} s" for run, result in results.items())
    print(f"{'passed' if passed else 'FAILED'}  {name}: {shown}\n        exit codes: {codes}", flush=True)
    found = {"passed": passed, "shown": shown, "runs": {n: _record(r) for n, r in results.items()}}
    if inject and passed:
        found["faults"] = injected(name, check, results, out, on_cpu)
        passed = all(fault["detected"] for fault in found["faults"].values())
    record(out, name, found, on_cpu)
    return passed


def injected(
    name: str, check: Check, results: dict[str, Result], out: Path, on_cpu: bool
) -> dict[str, dict[str, Any]]:
    """Makes the faults of a check one after the other, and returns which of them it detects."""
    found = {}
    for fault in check.faults:
        again = dict(results)
        for run in fault.runs:
            again[run.name] = execute(run, out, on_cpu)
            file = f"{name}_{fault.name.replace(' ', '_')}_{run.name}.log"
            (out / file).write_text(again[run.name].log, encoding="utf-8")
        passed, shown = check.verdict(fault.change(again))
        print(f"        {'MISSED' if passed else 'detected'} {fault.name}: {shown}", flush=True)
        found[fault.name] = {"detected": not passed, "shown": shown}
    return found


def record(out: Path, name: str, found: dict[str, Any], on_cpu: bool) -> None:
    """Writes the result of a check, and the rows of all checks, to results.json."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": [], "checks": {}}
    content["checks"][name] = found | {"row": tested_row(name, found["passed"], found["shown"], on_cpu)}
    content["rows"] = [check["row"] for check in content["checks"].values() if check["passed"] is not None]
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def tested_row(name: str, passed: bool, shown: str, on_cpu: bool) -> str:
    """Returns the row of a check for the table of docs/tested.md: check, device and torch, verdict."""
    import torch

    device = "CPU" if on_cpu or not torch.cuda.is_available() else torch.cuda.get_device_name()
    verdict = f"{'passed' if passed else 'FAILED'}: {shown}".replace("|", "\\|")
    return f"| `{name}` | {device}, torch {torch.__version__} | {verdict} |"


def _record(result: Result) -> dict[str, Any]:
    return {"code": result.code, "seconds": result.seconds, "steps": result.steps}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
