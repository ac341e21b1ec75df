"""Renews the generated parts of docs/metrics.md from tracking/metrics.toml and the rules of the alarms.

`python -m ppo_ds.tools.metrics_page docs/metrics.md` replaces the text between two pairs of comments.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ppo_ds.run.alarms import ALARMS, condition
from ppo_ds.tracking.catalogue import SECTIONS, Metric, Range, Section


def renewed(page: str) -> str:
    """Returns the text of docs/metrics.md with its parts about metrics and alarms renewed."""
    for name, text in {"metrics": "\n".join(map(section_text, SECTIONS)), "alarms": alarms_text()}.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{text}{end}{rest.partition(end)[2]}"
    return page


def section_text(section: Section) -> str:
    """Formats a section: metrics without range and remedy as a list, then all others under headings."""
    lines = [f"## {section.title}: `{section.prefix}/`" if section.prefix else f"## {section.title}", ""]
    advised = [one for one in section.metrics if one.healthy is not None or one.remedy]
    lines += [f"- `{one.name}`: {described(one)}" for one in section.metrics if one not in advised]
    lines += [f"\n### `{one.name}`\n\n{described(one)}" for one in advised]
    return "\n".join(lines) + "\n"


def described(metric: Metric) -> str:
    unit = f" ({metric.unit})" if metric.unit in ("nats", "nats per response", "tokens/s") else ""
    text = f"{metric.meaning.removesuffix('.')}{unit}."
    if metric.healthy is not None:
        text += f" **Healthy: {in_words(metric.healthy)}**; {metric.reason}. **Otherwise:**"
        text = re.sub(r"(; rule of thumb)?(; by definition(?=\.))?", "", text)
    return f"{text} {metric.remedy}".rstrip()


def in_words(healthy: Range) -> str:
    """Returns a range in words, such as "0 to 0.3" or "at least 0"."""
    low, high = healthy
    if low is None or high is None:
        return f"at most {high:g}" if low is None else f"at least {low:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def alarms_text() -> str:
    items = ((f"[`{name}`](#{re.sub('[^a-z0-9_]', '', name)})", alarm) for name, alarm in ALARMS.items())
    return "\n" + "".join(f"- {link} {condition(one)} ({one.steps}): {one.problem}.\n" for link, one in items)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renewed(file.read_text(encoding="utf-8")), encoding="utf-8")
