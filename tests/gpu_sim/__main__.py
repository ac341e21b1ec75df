"""Runs drives (tests/gpu_sim/drives) on the simulated GPU: python -m tests.gpu_sim [DRIVE ...]"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
import warnings
from importlib import import_module

from tests.gpu_sim import stub
from tests.gpu_sim.cases import CASES
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_sim", description=__doc__)
    parser.add_argument("drives", nargs="*", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--json", help="file to write the reports to, instead of printing them")
    arguments = parser.parse_args()
    if (reason := stub.missing()) is not None:
        print(f"skipped: {reason}")
        return 0
    warnings.simplefilter("ignore")
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
