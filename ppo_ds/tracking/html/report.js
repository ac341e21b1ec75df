// Puts the report together: result, alarms, curves, responses, metrics, time and memory, settings.

const ENDINGS = { done: "Finished", stop_at_step: "Stopped at run.stop_at_step", early_stop: "Stopped early",
  time_limit: "Time limit reached", signal: "Stopped by a signal", nonfinite: "Not finite", max_kl: "KL limit exceeded",
  max_parity: "Generation differs from training", reward_error: "The reward failed", error: "Ended with an error" };
const CALM = { done: "good", stop_at_step: "accent", early_stop: "accent", time_limit: "accent" };
const short = (value) => formatNumber(value, 3);
const FIGURES = [
  ["eval/win_rate_vs_ref", "wins over reference, ties count half", formatPercent],
  ["kl/ref_seq_mean", "KL in nats, last step", short],
  ["rollout/resp_len_mean", "tokens per response, last step", short],
  ["eval/token_accuracy", "held-out token accuracy", formatPercent],
  ["perf/tokens_per_s", "tokens per second, last step", short],
];

function statusBadge(run, data) {
  const ending = run.endedBy === null ? "No end recorded" : (ENDINGS[run.endedBy] ?? ENDINGS.error);
  const kind = data.running ? "accent" : (CALM[run.endedBy] ?? "warn");
  return h(`span.badge.${kind}`, h("span.dot"), data.running ? "In progress" : ending);
}

function headOfOne(run, data) {
  const last = (name) => run.series[name]?.values.at(-1);
  const figures = FIGURES.filter(([name]) => last(name) !== undefined)
    .map(([name, label, format]) => [format(last(name)), label]);
  figures.push([run.duration, `${formatNumber(run.lastStep, 9)} steps`]);
  if (run.result) figures.unshift([run.result.after, run.result.label, run.result.change]);
  return h("div",
    h("div.toolbar.run-facts", statusBadge(run, data), h("span.muted.small", run.method),
      h("span.faint.small.mono.directory", run.directory)),
    h("p.lead", run.ending),
    h("div.figures", figures.map(([value, label, change]) => h("div.figure",
      h("div.value", value, change && h("span.change", change)), h("div.label", label)))));
}

function headOfSeveral(data) {
  const rows = data.runs.map((run, i) => {
    return [h("span.run-name", h("span.dot", { style: { color: seriesColour(i) } }), run.name), statusBadge(run, data),
      formatNumber(run.lastStep, 9), run.duration, run.result?.label ?? MISSING,
      run.result?.before ?? MISSING, run.result?.after ?? MISSING, short(run.series["kl/ref_seq_mean"]?.values.at(-1))];
  });
  return h("div",
    h("div.card.runs-table", table(["Run", "Status", "Steps#", "Time#", "Result", "Before#", "After#", "KL of the last step#"], rows)));
}

function pageSection(id, title, text, ...children) {
  return h("section", { id }, h("h2", title), h("p.muted", text), ...children);
}

/** Returns the controls of all curves: smoothing, axis, marks and runs. */
function chartControls({ runs, marks }) {
  const changed = (state) => {
    redraw();
    return state;
  };
  const value = h("output.number", "0");
  const input = (event) => {
    view.smoothing = Number(event.target.value);
    value.textContent = String(view.smoothing);
    redraw();
  };
  const slider = { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, id: "smoothing", on: { input } };
  const hide = (i) => {
    if (!view.hiddenRuns.delete(i)) view.hiddenRuns.add(i);
    return changed(!view.hiddenRuns.has(i));
  };
  const kinds = [...new Set(marks.map((mark) => MARK_LABELS[mark.kind]))].join(", ");
  return h("div.toolbar.chart-controls",
    h("label.control", "Smoothing", h("input", slider), value),
    chip("Log axis", false, () => changed((view.log = !view.log)), { id: "log-axis" }),
    kinds && chip(`Marks: ${kinds}`, true, () => changed((view.marks = !view.marks)), { id: "marks" }),
    runs.length > 1 && runs.map((run, i) => chip(
      [h("span.dot", { style: { color: seriesColour(i) } }), ` ${run.name}`], true, () => hide(i), { dataset: { run: i } })));
}

function curves(data) {
  return data.overview.length > 0 && pageSection("curves", "Curves",
    "Point at a curve for its values; drag over steps to enlarge them, double-click to go back. A green band is " +
      "the healthy range. The line below a curve tells what it means and what to change.",
    h("div.grid", data.overview.map((panel) => panelCard(panel, data))));
}

function rewardOverKl({ runs }) {
  const series = runs.flatMap((run, i) => {
    const [score, kl] = ["reward/score_mean", "kl/ref_seq_mean"].map((name) => run.series[name]);
    const klAt = new Map(kl?.steps.map((step, k) => [step, kl.values[k]]));
    const kept = [...(score?.steps.keys() ?? [])].filter((k) => klAt.has(score.steps[k]));
    if (kept.length < 2) return [];
    const steps = kept.map((k) => score.steps[k]);
    const xs = steps.map((step) => Math.sqrt(Math.max(0, klAt.get(step))));
    const label = runs.length > 1 ? run.name : "mean score";
    return [{ label, colour: seriesColour(i), run: i, steps, xs, ys: kept.map((k) => score.values[k]) }];
  });
  if (!series.length) return null;
  const chart = pathChart({ label: "Reward over the square root of the KL", xLabel: "\u221aKL", series });
  return pageSection("frontier", "Reward over \u221aKL",
    "The score that each distance from the reference buys. Early steps are pale. A curve that bends down while " +
      "the KL grows is a sign of reward over-optimization.",
    h("figure.card.chart.wide",
      h("p.chart-unit.faint.small", "mean score, over \u221a of the KL per response in nats"),
      chart.element, series.length > 1 && legend(series)));
}

function responses({ runs }) {
  if (!runs.some((run) => run.samples.rows.length)) return null;
  const [title, text] = runs.every((run) => run.stage === "reward_model")
    ? ["Pairs", "How the model scored held-out pairs, step by step. Select a pair to read it in full."]
    : ["Responses", "What the model answered, step by step. Select an answer to read it in full."];
  return pageSection("responses", title, text, new Rollouts(runs).element);
}

function events({ runs }) {
  const all = runs.flatMap((run) => run.events.map((event) => ({ ...event, run: run.name })));
  const [alarms, others] = [true, false].map((loud) => all.filter(({ kind }) => ["alarm", "warning"].includes(kind) === loud));
  const title = (kind) => (kind.charAt(0).toUpperCase() + kind.slice(1)).replaceAll("_", " ");
  const badge = (kind) => h(kind === "alarm" ? "span.badge.warn" : "span.badge", title(kind));
  const several = runs.length > 1;
  // a resume continues the time of its checkpoint, which is before that of the end listed above it
  const list = (shown, timed) => h("div.card", table(
    [...(several ? ["Run"] : []), "Step#", ...(timed ? ["Time#"] : []), "Event", ""],
    shown.map((event) => [...(several ? [event.run] : []), formatNumber(event.step, 9), ...(timed ? [event.after] : []),
      badge(event.kind), event.text])));
  const text = alarms.length ? "Each alarm names the value and the key to change. Alarms never stop a run."
      : "No alarm and no warning in this run.";
  return pageSection("alarms", "Alarms", text,
    alarms.length > 0 && list(alarms, true),
    others.length > 0 && h("details.other-events", h("summary.muted.small", "Starts, resumes and ends"), list(others, false)));
}

function allMetrics(data) {
  if (!data.sections.length) return null;
  const sections = data.sections.map((section) => metricSection(section, data));
  const none = h("p.empty", { hidden: true }, "No metric matches.");
  const search = (query) => (none.hidden = filterMetrics(sections, data, query));
  return pageSection("metrics", "All metrics",
    "Every metric that the run logged, by section, with its meaning, healthy range and the key to change.",
    h("div.toolbar.tools", field("search", "Search metrics", search, { id: "metric-search" })),
    h("div.card.folds", sections.map(({ element }) => element)), none);
}

function settings({ runs }) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  if (!keys.length) return null;
  const text = (value) => (value === undefined ? MISSING : typeof value === "string" ? value : JSON.stringify(value));
  const values = (key) => runs.map((run) => text(run.settings[key]));
  const list = (shown) => table(["Key", ...runs.map((run) => run.name)], shown.map((key) =>
    h("tr", { dataset: { key } }, [key, ...values(key)].map((cell) => h("td", h("code", cell))))));
  const folds = [...Map.groupBy(keys, (key) => key.split(".")[0])].map(([group, inside]) => h("details.setting-group",
    h("summary", h("h3", group), h("span.faint.small", `${inside.length} key${inside.length > 1 ? "s" : ""}`)),
    list(inside)));
  const search = (query) => {
    for (const fold of folds) {
      const rows = [...fold.querySelectorAll("tr[data-key]")];
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(query.trim().toLowerCase());
      fold.hidden = rows.every((row) => row.hidden);
      fold.open = query.trim() !== "" && !fold.hidden;
    }
  };
  const different = keys.filter((key) => new Set(values(key)).size > 1);
  return pageSection("settings", "Settings", "The complete config of the run, with all defaults, as in config.yaml.",
    runs.length > 1 && h("div.card.differences", h("h3", "Differences"),
      different.length ? list(different) : h("p.muted", "The runs have the same settings.")),
    h("div.toolbar.tools", field("search", "Search settings", search, { id: "settings-search" })),
    h("div.card.folds", folds));
}

function showReport(data) {
  data.marks = data.runs.flatMap((run, i) => run.events.filter(({ kind }) => kind !== "warning" && kind in MARK_LABELS)
    .map((event) => ({ ...event, run: i })));
  const alarmed = data.marks.some(({ kind }) => kind === "alarm");
  const sections = [alarmed && events(data), curves(data), rewardOverKl(data), responses(data),
    !alarmed && events(data), allMetrics(data), settings(data)].filter(Boolean);
  const links = sections.map(({ id, firstChild }) => h("a", { href: `#${id}` }, firstChild.textContent));
  document.getElementById("report").append(
    data.runs.length === 1 ? headOfOne(data.runs[0], data) : headOfSeveral(data),
    h("div.sticky.no-print", h("nav.page-nav", { "aria-label": "Sections" }, links),
      data.overview.length > 0 && chartControls(data)),
    ...sections,
    h("footer.faint.small", `ppo_ds report, written ${data.written}.`,
      data.running && " The run rewrites this file; reload it for newer steps."));
}

showReport(pageData());
