"""Generates docs/metrics.md from tracking/metrics.toml.

`python -m ppo_ds.tools.metrics_page > docs/metrics.md` generates the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ppo_ds.run.alarms import ALARMS, WINDOW, condition
from ppo_ds.tracking.catalogue import SECTIONS, Metric, Range, Section

_HEAD = """\
# Metrics

Every metric of every stage: what it is, where it usually stays, and what to do when it leaves that range.
This page is generated from `ppo_ds/tracking/metrics.toml` by
`python -m ppo_ds.tools.metrics_page > docs/metrics.md`. `report.html`, `curves.png` and the
[dashboards](dashboards.md) read the same file.

A run logs one number per metric and step, masked and reduced over all ranks. The numbers are the same in
`metrics.jsonl`, on the console and in every dashboard. A metric that the algorithm or the stage does not
compute is absent. A number that is not finite is null and counted in `health/nonfinite`. Means are over the
responses or tokens of all ranks, never means of means.

**Healthy** is the range in which a run usually stays if it learns, followed by the reason for it. "Rule of
thumb" means that the range rests on experience only. A value outside its range is a reason to look at the
samples, not an error. Measured values are those of the CPU runs in this repository: the quickstart with a
tiny model, and [SmolLM2](smollm2/README.md). No range was measured on a GPU.

What to look at first with `stage=ppo`: `reward/score_mean` rises, `kl/ref_seq_mean` grows slowly,
`policy/clipfrac` is neither 0 nor large, `value/explained_var` rises above 0, `rollout/truncated_frac` is
small, and `parity/logp_abs_diff_mean` is small. Then read `samples/`: a score can rise for wrong reasons.
"""

_ALARMS = """\
## Alarms

A run compares its metrics with a few rules and warns once per episode, with one line on the console and in
`events.jsonl`. An alarm never stops a run; `health.max_kl` with `health.kl_action=stop`, `health.max_parity`,
`health.max_skips` and `eval.patience` can. A condition must hold for the given number of steps in a row. The
alarm is raised again only after the condition was false for as many steps. A resumed run raises the same
alarms as one that was not interrupted. "Start" is the mean of the first {window} steps. The limits are rules
of thumb. A run that learns may raise an alarm: in [a first run](first_run.md) the policy moves far from the
reference, since its reward asks for that.

| metric | condition | steps | problem | what to change |
|---|---|---|---|---|
"""

_FILES = """\
## Events and samples

`events.jsonl` has one JSON object per line: `step`, `time` (seconds of the run), `kind` and `text`. Kinds are
`started`, `resumed`, `rolled_back`, `warning`, `alarm` and `ended`. Lines are only added, also after a
rollback; a run that begins anew has a new file.

`samples/step_NNNNNN.jsonl` has `tracker.samples` responses of a step, `samples/eval_step_NNNNNN.jsonl` those
of an evaluation. The keys of a row with `stage=ppo`:

| key | meaning |
|---|---|
| `prompt` | the prompt as the model receives it |
| `asked` | the last message of a chat, without the template; the prompt otherwise |
| `prompt_id` | the same for a prompt in all steps |
| `response`, `length` | text and number of tokens |
| `finish`, `ended_by` | `stop`, or `length` if the response was cut at its limit; the end token |
| `score`, `components` | score, and its parts by name if the reward has several |
| `rewards` | in evaluations: the scores by the rewards of `eval.rewards` |
| `kl` | log pi - log pi_ref, summed over the tokens (nats) |
| `tokens` | with `tracker.sample_tokens=N`: columns with one entry for each of the first N tokens |

The columns of `tokens`, in which numbers have four decimals:

| column | meaning |
|---|---|
| `text`, `ids` | pieces that together are the text, special tokens included; token ids |
| `logprobs`, `ref_logprobs` | of the actor and the reference, before the update |
| `values` | of the critic, in the state before the token |
| `advantages` | as the update uses them, but for a whitening of each minibatch |
| `rewards` | shaped score and KL penalty; the last token also has the reward of the state after it |

Columns that the algorithm does not compute are absent, such as `values` without a critic. A step adds at most
about 60 bytes times `tracker.samples` times `tracker.sample_tokens`.
"""


def page() -> str:
    """Returns the text of docs/metrics.md."""
    parts = [_HEAD, *map(section_text, SECTIONS), alarms_text(), _FILES]
    return "\n".join(parts)


def section_text(section: Section) -> str:
    title = f"{section.title}: `{section.prefix}/`" if section.prefix else section.title
    lines = [f"## {title}", "", "| metric | unit | meaning | healthy | what to do |", "|---|---|---|---|---|"]
    lines += [table_row(cells_of(metric)) for metric in section.metrics]
    return "\n".join(lines) + "\n"


def cells_of(metric: Metric) -> Sequence[str]:
    healthy = "" if metric.healthy is None else f"{in_words(metric.healthy)}; {metric.reason}"
    return (f"`{metric.name}`", metric.unit, metric.meaning, healthy, metric.remedy)


def in_words(healthy: Range) -> str:
    """Returns a range in words, such as "0 to 0.3" or "at least 0"."""
    low, high = healthy
    if low is None or high is None:
        return f"at most {high:g}" if low is None else f"at least {low:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def alarms_text() -> str:
    rows = [
        table_row((f"`{name}`", condition(alarm), str(alarm.steps), alarm.problem, alarm.advice))
        for name, alarm in ALARMS.items()
    ]
    return _ALARMS.format(window=WINDOW) + "\n".join(rows) + "\n"


def table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(page(), end="")
