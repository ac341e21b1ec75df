"""Judges: functions of a check's results that return whether they are as expected, and one line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.checks.runs import Judge, Metrics, Result, Results, Verdict

SLOWER_END = 60.0  # seconds that a run with a dead rank may take longer than one without
GIB_PER = {"GiB": 1.0, "MiB": 1 / 1024, "KiB": 1 / 1024**2}


def all_of(*judges: Judge) -> Judge:
    """Combines judges, all of which must be satisfied."""

    def judge(results: Results) -> Verdict:
        verdicts = [each(results) for each in judges]
        return all(passed for passed, _ in verdicts), "; ".join(shown for _, shown in verdicts)

    return judge


def shown_values(values: Iterable[tuple[str, float]], form: str = ".4g") -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in values)


def largest(values: Iterable[float]) -> float:
    """Returns the largest value, or NaN if one is NaN."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def environment_set(results: Results) -> Verdict:
    """Expects the defaults of the environment that the trainer sets before torch is imported."""
    log = results["versions"].log
    wanted = ("'TORCH_CUDNN_SDPA_DEPRIORITIZED': '1'", "'PYTORCH_ALLOC_CONF': 'expandable_segments:True'")
    missing = [each for each in wanted if each not in log]
    *versions, _ = log.strip().splitlines()
    return not missing, "; ".join([*versions, f"missing: {missing}" if missing else "the defaults are set"])


def ratio_of(metric: str, low: float, high: float) -> Judge:
    """Expects that ``metric`` of each run, divided by that of the first run, is in [low, high]."""

    def judge(results: Results) -> Verdict:
        first, *others = results.items()
        ratios = {name: result.median(metric) / first[1].median(metric) for name, result in others}
        passed = all(low <= ratio <= high for ratio in ratios.values())
        base = f"{metric} = {first[1].median(metric):.4g} ({first[0]})"
        return passed, f"{base}; divided by it: {shown_values(ratios.items())} (from {low:g} to {high:g})"

    return judge


def first_gradients(results: Results) -> Verdict:
    """Expects that the gradient norms of the first step agree within 5 percent."""
    norms = {name: result.steps[0]["policy/grad_norm"] for name, result in results.items()}
    shown = shown_values(norms.items(), ".5g")
    return largest(norms.values()) <= 1.05 * min(
        norms.values()
    ), f"policy/grad_norm of the first step: {shown}"


def same_gradients(tolerance: float, steps: slice = slice(None)) -> Judge:
    """Expects that the gradient norms of both models agree in each step, relative to the first run."""

    def judge(results: Results) -> Verdict:
        first, *others = results.values()
        differences = {}
        for name, other in zip(list(results)[1:], others, strict=True):
            found = [
                abs(b[norm] / a[norm] - 1)
                for a, b in zip(first.steps[steps], other.steps[steps], strict=True)
                for norm in ("policy/grad_norm", "value/grad_norm")
            ]
            differences[name] = largest(found)
        passed = all(difference <= tolerance for difference in differences.values())  # false for NaN
        count = f"{len(first.steps[steps])} step(s)"
        shown = shown_values(differences.items(), ".2g")
        return (
            passed,
            f"gradient norms of {count} differ from {next(iter(results))} by: {shown} (limit {tolerance:g})",
        )

    return judge


def resumed_gradients(tolerance: float) -> Judge:
    """Expects that the steps of "fewer" have the gradient norms of the last steps of "straight"."""

    def judge(results: Results) -> Verdict:
        straight, fewer = results["straight"], results["fewer"]
        same = replace(straight, steps=straight.steps[-2:])
        return same_gradients(tolerance)({"straight": same, "fewer": fewer})

    return judge


def parity_below(nats: float, *names: str) -> Judge:
    """Expects finite gradients, and log-probs of decoding that differ from training by less than ``nats``.

    The run ``fp16`` may skip steps until its loss scale is low enough.
    """

    def judge(results: Results) -> Verdict:
        chosen = {name: result for name, result in results.items() if not names or name in names}
        gaps = {
            name: largest(step["parity/logp_abs_diff_mean"] for step in result.steps)
            for name, result in chosen.items()
        }
        finite = all(
            math.isfinite(step["policy/grad_norm"])
            for name, result in chosen.items()
            for step in result.steps
            if name != "fp16" or not step["health/skipped_steps"]
        )
        shown = f"mean gaps in nats: {shown_values(gaps.items(), '.2g')} (limit {nats:g})"
        return finite and all(gap < nats for gap in gaps.values()), shown + "; NaN in a gradient" * (
            not finite
        )

    return judge


def decoding_agrees(nats: float) -> Judge:
    """Expects log-probs of decoding within ``nats`` of those of training, and decoding with CUDA graphs."""

    def judge(results: Results) -> Verdict:
        static = results["static"]
        gap, hf = (
            static.median("parity/logp_abs_diff_mean"),
            results["hf"].median("parity/logp_abs_diff_mean"),
        )
        graphs = "without CUDA graphs" not in static.log
        others = {name: results[name].median("time/generate") for name in ("hf", "narrow")}
        ratios = ", ".join(
            f"{n} {seconds / static.median('time/generate'):.3g}" for n, seconds in others.items()
        )
        shown = f"mean gap {gap:.2g} nats (static), {hf:.2g} (hf); CUDA graphs: {'yes' if graphs else 'no'}"
        return gap < nats and graphs, f"{shown}; seconds of generation, divided by static: {ratios}"

    return judge


def same_after_resume(results: Results) -> Verdict:
    """Expects that a run that was stopped and resumed has the metrics of an uninterrupted one."""
    straight, resumed = results["straight"].steps, results["resumed"].steps

    def numbers(step: Metrics) -> dict[str, float]:
        apart = ("time", "perf", "mem")
        found = {name: value for name, value in step.items() if name.partition("/")[0] not in apart}
        return {name: value for name, value in found.items() if name != "health/rank_time_spread_s"}

    different = sorted(
        name
        for a, b in zip(straight, resumed, strict=True)
        for name in numbers(a).keys() | numbers(b).keys()
        if a.get(name) != b.get(name)
    )
    shown = f"different: {', '.join(dict.fromkeys(different))}" if different else "all metrics are equal"
    return not different, f"{len(straight)} steps: {shown}"


def memory_estimate(run: str, low: float, high: float) -> Judge:
    """Expects that the doctor's peak is between ``low`` and ``high`` of the measured one of ``run``.

    Reserved memory includes what the allocator holds in fragments, which the doctor does not count. On a CPU,
    the memory of the process is measured, most of which is that of the libraries.
    """

    def judge(results: Results) -> Verdict:
        found = re.search(r"^(?:fits|too much) +([\d.]+) (GiB|MiB|KiB)", results["doctor"].log, re.MULTILINE)
        estimated = float(found[1]) * GIB_PER[found[2]] if found else math.nan
        peaks = {name: max(result.peaks()) for name, result in results.items() if result.steps}
        shown = f"estimate {estimated:.3g} GiB; measured peaks: {shown_values(peaks.items(), '.3g')}"
        ratio = estimated / peaks[run]
        return low <= ratio <= high, f"{shown}; ratio to {run} {ratio:.2g} (from {low:g} to {high:g})"

    return judge


def no_growth(limit: float) -> Judge:
    """Expects that memory after the last step is at most ``limit`` times that after the third step."""

    def judge(results: Results) -> Verdict:
        peaks = results["steps"].peaks()
        shown = ", ".join(f"{peak:.3g}" for peak in peaks)
        grown = peaks[-1] / peaks[2]
        return grown <= limit, f"grown to {grown:.3f} (limit {limit:g}); peak in GiB, by step: {shown}"

    return judge


def out_of_memory(results: Results) -> Verdict:
    """Expects that the run ends with exit code 1 and one line, which names the budget that was halved."""
    result = results["update"]
    lines = [line for line in result.log.splitlines() if "memory.train_tokens" in line]
    shown = lines[-1] if lines else "no line on memory.train_tokens"
    return bool(lines) and "Traceback" not in result.log, shown


def waits(results: Results) -> Verdict:
    """Expects that no forward and no backward synchronizes the device, on any rank."""
    found = re.findall(r"^rank \d+: synchronizations of the device: (\d+) (.*)$", results["steps"].log, re.M)
    most, where = max((int(number), where) for number, where in found)
    return most == 0, f"{most} in forwards and backwards of two steps {where}"


def ended_together(results: Results) -> Verdict:
    """Expects one line on the rank that was killed, no traceback before it, and an end in time."""
    killed, whole = results["killed"], results["whole"]
    lines = [line for line in killed.log.splitlines() if "stopped because rank 1 failed" in line]
    before = killed.log.partition("stopped because rank 1 failed")[0]
    more = killed.seconds - whole.seconds
    passed = len(lines) == 1 and "Traceback" not in before and more <= SLOWER_END
    line = lines[0] if lines else "no line on the rank that was killed"
    return passed, f"{more:+.0f} s of a whole run (limit +{SLOWER_END:g} s): {line}"


def efficiency(ranks: int, low: float) -> Judge:
    """Expects that ``ranks`` ranks with the same samples per rank reach ``low`` of the speed of one."""

    def judge(results: Results) -> Verdict:
        one, all_ranks = (results[name].median("time/step") for name in ("one", "all"))
        shown = f"{one:.3g} s on one rank, {all_ranks:.3g} s on {ranks}"
        return one / all_ranks >= low, f"{shown}: efficiency {one / all_ranks:.2f} (at least {low:g})"

    return judge


def weights_follow(nats: float) -> Judge:
    """Expects that vLLM's log-probs follow the trained weights.

    The mean gap to training stays below ``nats`` in each step, and the updates have moved the log-probs by
    at least five times the gap, so that earlier weights would have been noticed. The movement follows from
    the KL to the reference, which has the weights of the start: k3 is about half of its square.
    """

    def judge(results: Results) -> Verdict:
        passed, shown = True, []
        for name, result in results.items():
            gap = largest(step["parity/logp_abs_diff_mean"] for step in result.steps)
            moved = math.sqrt(2 * max(result.steps[-1]["kl/k3_token_mean"], 0.0))
            passed &= gap < nats and moved >= 5 * gap
            shown.append(f"{name} {gap:.2g}, moved by {moved:.2g}")
        return passed, f"mean gaps in nats (limit {nats:g}): {'; '.join(shown)}"

    return judge


def start_of(result: Result) -> tuple[float, str]:
    """Returns the seconds of vLLM's start and the folders of its cache."""
    found = re.search(r"^vllm start: ([\d.]+) s; cache: (.*)$", result.log, re.M)
    if found is None:
        raise ValueError("no line on vLLM's start")
    return float(found[1]), found[2]


def cache_is_hit(compiles: bool) -> Judge:
    """Expects that a second start finds the folders of the first one in vLLM's cache, and adds none.

    With ``compiles``, there must be compiled graphs, and the second start must not take longer.
    """

    def judge(results: Results) -> Verdict:
        (first, cold), (second, warm) = start_of(results["cold"]), start_of(results["warm"])
        passed = cold == warm and (not compiles or ("torch_compile_cache" in cold and second <= first))
        same = "the same cache" if cold == warm else f"another cache: {warm} instead of {cold}"
        return passed, f"start {first:.0f} s, then {second:.0f} s, with {same}"

    return judge


def memory_returned(cache_gb: float) -> Judge:
    """Expects that sleeping frees 90 percent of the cache, and as much after the last step as at first."""

    def judge(results: Results) -> Verdict:
        lines = re.findall(r"^vllm awake: ([\d.]+) GiB free; asleep: ([\d.]+)", results["sleep"].log, re.M)
        awake, asleep = ([float(line[i]) for line in lines] for i in (0, 1))
        freed = min(b - a for a, b in zip(awake, asleep, strict=True))
        passed = len(lines) > 1 and freed >= 0.9 * cache_gb and asleep[-1] >= 0.98 * asleep[0]
        shown = f"{len(lines)} times asleep; freed at least {freed:.2f} GiB of a cache of {cache_gb:g}"
        return passed, f"{shown}; free GiB asleep, first and last: {asleep[0]:.1f}, {asleep[-1]:.1f}"

    return judge
