"""Runs drives (tests/gpu_sim/drives) on the simulated GPU: python -m tests.gpu_sim [DRIVE ...]"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from importlib import import_module

from tests.gpu_sim import stub
from tests.gpu_sim.cases import CASES, LEARNED
from tests.gpu_sim.report import Report, listed


def run(drive: str) -> dict[str, Report]:
    """Runs all cases of a drive. If a case raises, its report has the traceback."""
    from tests.gpu_sim.fake_cuda import fake_cuda

    cases, reports = import_module(f"tests.gpu_sim.drives.{drive}").CASES, {}
    for name, case in cases.items():
        with fake_cuda() as device:
            try:
                case(device)
            except Exception:
                device.report.error = traceback.format_exc()
        reports[name] = device.report
    return reports


def print_report(name: str, report: Report) -> None:
    found = {
        "mixed devices": report.mixed,
        "waits": report.waits,
        "blocking uploads": report.blocking_uploads,
        "waits and uploads inside a capture": report.in_capture,
    }
    print(f"{name}: {report.operations.total()} operations, {report.facts}")
    for what, counter in found.items():
        if counter:
            print(f" {what}:{listed(counter)}")
    if report.error:
        print(report.error)


def print_table() -> None:
    """Prints waits, uploads and captures of decoding, and of the micro-batches of the PPO update."""
    rows = {f"decoding of {name}": [report] for name, report in run("table").items()}
    updates = run("learner")
    for what in LEARNED:
        one, two = (updates[f"{what} {number} micro-batches"] for number in (1, 2))
        rows[f"update ({what}), one micro-batch"] = [one]
        rows[f"update ({what}), each further one"] = [two, one]
    print("| | waits | blocking uploads | asynchronous uploads | captures | kernels per token |")
    print("|---|---|---|---|---|---|")
    for name, (report, *less) in rows.items():
        if report.error:
            print(f"| {name} | {report.error.strip().splitlines()[-1][:100]} | | | | |")
            continue
        counts = [
            getattr(report, column).total() - sum(getattr(other, column).total() for other in less)
            for column in ("waits", "blocking_uploads", "pinned_uploads")
        ]
        facts = [str(report.facts.get(fact, "")) for fact in ("captures", "kernels")]
        print("|", " | ".join([name, *map(str, counts), *facts]), "|")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_sim", description=__doc__)
    parser.add_argument("drives", nargs="*", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--table", action="store_true", help="print the table of docs/performance.md")
    parser.add_argument("--json", help="file to write the reports to, instead of printing them")
    parser.add_argument("--code", help="folder whose ppo_ds is driven, such as a checkout of another commit")
    arguments = parser.parse_args()
    if (reason := stub.missing()) is not None:
        print(f"skipped: {reason}")
        return 0
    if arguments.code:
        sys.path.insert(0, arguments.code)
    warnings.simplefilter("ignore")
    if arguments.table:
        print_table()
        return 0
    reports = {drive: run(drive) for drive in arguments.drives or CASES}
    if arguments.json:
        content = {
            drive: {name: vars(report) for name, report in found.items()} for drive, found in reports.items()
        }
        with open(arguments.json, "w") as file:
            json.dump(content, file)
    else:
        for found in reports.values():
            for name, report in found.items():
                print_report(name, report)
    return int(any(report.error for found in reports.values() for report in found.values()))


if __name__ == "__main__":
    sys.exit(main())
