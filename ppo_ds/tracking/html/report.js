// Puts the report together: result, alarms, curves, responses, metrics, time and memory, settings.

const ENDINGS = {
  done: ["Finished", "good"],
  stop_at_step: ["Stopped at run.stop_at_step", "accent"],
  early_stop: ["Stopped early", "accent"],
  time_limit: ["Time limit reached", "accent"],
  signal: ["Stopped by a signal", "warn"],
  nonfinite: ["Not finite", "warn"],
  max_kl: ["KL limit exceeded", "warn"],
  max_parity: ["Generation differs from training", "warn"],
  error: ["Ended with an error", "warn"],
};
const STAGES = { ppo: "PPO", sft: "Supervised fine-tuning", reward_model: "Reward model" };
const EVENT_LABELS = {
  started: "Started",
  resumed: "Resumed",
  rolled_back: "Rolled back",
  warning: "Warning",
  alarm: "Alarm",
  ended: "Ended",
};

function statusOf(run, running) {
  if (running) return ["In progress", "accent"];
  return run.endedBy === null ? ["No end recorded", "warn"] : (ENDINGS[run.endedBy] ?? ENDINGS.error);
}

/** Formats a value of the main metric of a run. */
function resultValue(result, value) {
  return result.share ? formatPercent(value) : formatNumber(value, 3);
}

// -- the head -----------------------------------------------------------------------------------------------

function headOfOne(run, data) {
  const [status, kind] = statusOf(run, data.running);
  const figures = [];
  const { result } = run;
  if (result) {
    const change = result.after - result.before;
    const sign = change > 0 ? "+" : "";
    const text = result.share
      ? `${sign}${formatNumber(100 * change, 3)} points`
      : `${sign}${formatNumber(change, 3)}`;
    figures.push([resultValue(result, result.after), result.label, text]);
  }
  const last = (name) => run.series[name]?.values.at(-1);
  const optional = [
    ["eval/win_rate_vs_ref", "wins against the reference", formatPercent],
    ["kl/ref_seq_mean", "KL to the reference, nats", (value) => formatNumber(value, 3)],
    ["rollout/resp_len_mean", "tokens per response", (value) => formatNumber(value, 3)],
    ["eval/token_accuracy", "held-out token accuracy", formatPercent],
    ["perf/tokens_per_s", "tokens per second", (value) => formatNumber(value, 3)],
  ];
  for (const [name, label, format] of optional)
    if (last(name) !== undefined) figures.push([format(last(name)), label, ""]);
  figures.push([formatDuration(run.seconds ?? NaN), `${formatNumber(run.lastStep, 9)} steps`, ""]);
  return el(
    "div",
    {},
    el(
      "div",
      { class: "toolbar run-facts" },
      el("span", { class: `badge ${kind}` }, el("span", { class: "dot" }), status),
      el("span", { class: "muted small" }, STAGES[run.stage] ?? run.stage),
      el("span", { class: "faint small mono directory" }, run.directory),
    ),
    el("p", { class: "lead" }, run.sentences.join(" ")),
    el(
      "div",
      { class: "figures" },
      figures.map(([value, label, change]) =>
        el(
          "div",
          { class: "figure" },
          el("div", { class: "value" }, value, change && el("span", { class: "change" }, change)),
          el("div", { class: "label" }, label),
        ),
      ),
    ),
  );
}

function headOfSeveral(data) {
  const header = ["Run", "Status", "Steps", "Time", "Result", "Before", "After", "KL"];
  const rows = data.runs.map((run, i) => {
    const [status, kind] = statusOf(run, data.running);
    const dot = el("span", { class: "dot" });
    dot.style.background = seriesColour(i);
    const { result } = run;
    return el(
      "tr",
      {},
      el("td", {}, el("span", { class: "run-name" }, dot, run.name)),
      el("td", {}, el("span", { class: `badge ${kind}` }, status)),
      el("td", { class: "number" }, formatNumber(run.lastStep, 9)),
      el("td", { class: "number" }, formatDuration(run.seconds ?? NaN)),
      el("td", {}, result?.label ?? MISSING),
      el("td", { class: "number" }, result ? resultValue(result, result.before) : MISSING),
      el("td", { class: "number" }, result ? resultValue(result, result.after) : MISSING),
      el("td", { class: "number" }, formatNumber(run.series["kl/ref_seq_mean"]?.values.at(-1), 3)),
    );
  });
  return el(
    "div",
    {},
    el(
      "div",
      { class: "card table-wrap runs-table" },
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            header.map((text, i) => el("th", { class: i > 1 && text !== "Result" ? "number" : "" }, text)),
          ),
        ),
        el("tbody", {}, rows),
      ),
    ),
    el(
      "div",
      { class: "run-sentences" },
      data.runs.map((run) => el("p", {}, el("b", {}, `${run.name}: `), run.sentences.join(" "))),
    ),
  );
}

function navigation(sections) {
  return el(
    "nav",
    { class: "page-nav no-print", "aria-label": "Sections" },
    sections.map(([id, title]) => el("a", { href: `#${id}` }, title)),
  );
}

// -- sections -----------------------------------------------------------------------------------------------

function pageSection(id, title, text, ...children) {
  return el("section", { id }, el("h2", {}, title), el("p", { class: "muted" }, text), ...children);
}

/** Returns the controls of all curves: smoothing, axis, marks and runs. */
function chartControls(data, marks) {
  const redraw = () => {
    for (const chart of charts) chart.redraw();
  };
  const value = el("output", { class: "number" }, "0");
  const smoothing = el("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: 0,
    id: "smoothing",
    on: {
      input: (event) => {
        view.smoothing = Number(event.target.value);
        value.textContent = view.smoothing.toFixed(2).replace(/\.?0+$/, "");
        redraw();
      },
    },
  });
  const toggle = (label, id, change, pressed) =>
    el(
      "button",
      {
        class: "chip",
        id,
        "aria-pressed": pressed,
        on: {
          click: (event) => {
            event.currentTarget.setAttribute("aria-pressed", change());
            redraw();
          },
        },
      },
      label,
    );
  const runs =
    data.runs.length > 1 &&
    data.runs.map((run, i) => {
      const dot = el("span", { class: "dot" });
      dot.style.background = seriesColour(i);
      const chip = toggle(
        "",
        null,
        () => {
          if (!view.hiddenRuns.delete(i)) view.hiddenRuns.add(i);
          return !view.hiddenRuns.has(i);
        },
        true,
      );
      chip.dataset.run = i;
      chip.append(dot, ` ${run.name}`);
      return chip;
    });
  const kinds = [...new Set(marks.map((mark) => mark.kind))];
  return el(
    "div",
    { class: "toolbar chart-controls" },
    el("label", { class: "control" }, "Smoothing", smoothing, value),
    toggle("Log axis", "log-axis", () => (view.log = !view.log), false),
    marks.length > 0 &&
      toggle(
        `Marks: ${kinds.map((kind) => MARK_LABELS[kind]).join(", ")}`,
        "marks",
        () => (view.marks = !view.marks),
        true,
      ),
    runs,
  );
}

function rewardOverKl(data) {
  const series = data.runs.flatMap((run, i) => {
    const [score, kl] = ["reward/score_mean", "kl/ref_seq_mean"].map((name) => run.series[name]);
    if (!score || !kl) return [];
    const klAt = new Map(kl.steps.map((step, k) => [step, kl.values[k]]));
    const kept = score.steps.map((step, k) => k).filter((k) => klAt.has(score.steps[k]));
    if (kept.length < 2) return [];
    return [
      {
        label: data.runs.length > 1 ? run.name : "mean score",
        colour: seriesColour(i),
        run: i,
        steps: kept.map((k) => score.steps[k]),
        xs: kept.map((k) => Math.sqrt(Math.max(0, klAt.get(score.steps[k])))),
        ys: kept.map((k) => score.values[k]),
      },
    ];
  });
  if (!series.length) return null;
  const chart = new PathChart({
    label: "Reward over the square root of the KL",
    xLabel: "\u221aKL",
    yLabel: "score",
    series,
  });
  return pageSection(
    "frontier",
    "Reward over \u221aKL",
    "The score that each distance from the reference buys. Early steps are pale. A curve that bends down " +
      "while the KL grows is a sign of reward over-optimization.",
    el(
      "figure",
      { class: "card chart wide" },
      el("p", { class: "chart-unit faint small" }, "mean score, over \u221a of the KL per response in nats"),
      chart.element,
      series.length > 1 && el("div", { class: "legend" }, series.map(legendEntry)),
    ),
  );
}

function timeAndMemory(data) {
  const cards = data.runs.flatMap((run) =>
    run.stacks.map((area) => {
      const parts = Object.entries(area.parts).map(([label, values], i, all) => ({
        label,
        values,
        colour: label === "other" && all.length > 1 ? "var(--series-8)" : seriesColour(i),
      }));
      const chart = new StackChart({ label: area.title, unit: area.unit, steps: area.steps, parts });
      const legend = parts.map(({ label, colour }) => {
        const dot = el("span", { class: "dot square" });
        dot.style.background = colour;
        return el("span", { class: "legend-entry" }, dot, label);
      });
      return el(
        "figure",
        { class: "card chart" },
        el(
          "div",
          { class: "chart-head" },
          el("h3", {}, data.runs.length > 1 ? `${area.title}: ${run.name}` : area.title),
        ),
        el("p", { class: "chart-unit faint small" }, area.unit === "s" ? "seconds per step" : area.unit),
        chart.element,
        el("div", { class: "legend" }, legend),
      );
    }),
  );
  if (!cards.length) return null;
  return pageSection(
    "time",
    "Time and memory",
    "Where the seconds of a step go, and the memory that the run holds.",
    el("div", { class: "grid grid-wide" }, cards),
  );
}

function events(data) {
  const several = data.runs.length > 1;
  const all = data.runs.flatMap((run) => run.events.map((event) => ({ ...event, run: run.name })));
  const alarms = all.filter(({ kind }) => kind === "alarm" || kind === "warning");
  const row = (event) =>
    el(
      "tr",
      { class: event.kind },
      several && el("td", {}, event.run),
      el("td", { class: "number" }, formatNumber(event.step, 9)),
      el("td", { class: "number" }, formatDuration(event.time)),
      el(
        "td",
        {},
        el(
          "span",
          { class: `badge ${event.kind === "alarm" ? "warn" : ""}` },
          EVENT_LABELS[event.kind] ?? event.kind,
        ),
      ),
      el("td", {}, event.text),
    );
  const table = (list) =>
    el(
      "div",
      { class: "table-wrap" },
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            several && el("th", {}, "Run"),
            el("th", { class: "number" }, "Step"),
            el("th", { class: "number" }, "Time"),
            el("th", {}, "Event"),
            el("th", {}, ""),
          ),
        ),
        el("tbody", {}, list.map(row)),
      ),
    );
  const recorded = data.runs.some((run) => run.events.length > 0);
  const others = all.filter((event) => !alarms.includes(event));
  return pageSection(
    "alarms",
    "Alarms",
    recorded
      ? alarms.length
        ? "Each alarm names the value and the key to change. Alarms never stop a run."
        : "No alarm and no warning in this run."
      : "This run has no events.jsonl: it is from a version that did not record events.",
    alarms.length > 0 && el("div", { class: "card" }, table(alarms)),
    others.length > 0 &&
      el(
        "details",
        { class: "other-events" },
        el("summary", { class: "muted small" }, "Starts, resumes and ends"),
        el("div", { class: "card" }, table(others)),
      ),
  );
}

// -- settings -----------------------------------------------------------------------------------------------

function settingText(value) {
  if (value === undefined) return MISSING;
  if (value === null) return "null";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function settings(data) {
  const { runs } = data;
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  if (!keys.length) return null;
  const several = runs.length > 1;
  const differs = (key) => new Set(runs.map((run) => settingText(run.settings[key]))).size > 1;
  const table = (list) =>
    el(
      "div",
      { class: "table-wrap" },
      el(
        "table",
        { class: "settings-table" },
        several &&
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              el("th", {}, "Key"),
              runs.map((run) => el("th", {}, run.name)),
            ),
          ),
        el(
          "tbody",
          {},
          list.map((key) =>
            el(
              "tr",
              { dataset: { key } },
              el("td", {}, el("code", {}, key)),
              runs.map((run) =>
                el("td", { class: "setting-value" }, el("code", {}, settingText(run.settings[key]))),
              ),
            ),
          ),
        ),
      ),
    );
  const groups = Map.groupBy(keys, (key) => key.split(".")[0]);
  const folds = [...groups].map(([group, list]) =>
    el(
      "details",
      { class: "setting-group" },
      el(
        "summary",
        {},
        el("h3", {}, group),
        el("span", { class: "faint small" }, `${list.length} key${list.length > 1 ? "s" : ""}`),
      ),
      table(list),
    ),
  );
  const search = el("input", {
    type: "search",
    id: "settings-search",
    placeholder: "Search settings",
    "aria-label": "Search settings",
    on: { input: debounced((event) => filterSettings(folds, event.target.value)) },
  });
  addEventListener("beforeprint", () => printSettings(folds));
  const different = several ? keys.filter(differs) : [];
  return pageSection(
    "settings",
    "Settings",
    "The complete config of the run, with all defaults, as in config.yaml.",
    several &&
      el(
        "div",
        { class: "card differences" },
        el("h3", {}, "Differences"),
        different.length ? table(different) : el("p", { class: "muted" }, "The runs have the same settings."),
      ),
    el("div", { class: "toolbar settings-tools" }, search),
    el("div", { class: "card folds" }, folds),
  );
}

/** Opens all settings while the page is printed. */
function printSettings(folds) {
  const closed = folds.filter((fold) => !fold.open);
  for (const fold of closed) fold.open = true;
  const close = () => closed.forEach((fold) => (fold.open = false));
  addEventListener("afterprint", close, { once: true });
}

function filterSettings(folds, query) {
  const wanted = query.trim().toLowerCase();
  for (const fold of folds) {
    const rows = [...fold.querySelectorAll("tr[data-key]")];
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    fold.hidden = rows.every((row) => row.hidden);
    fold.open = wanted !== "" && !fold.hidden;
  }
}

// -- the page -----------------------------------------------------------------------------------------------

function curves(data, marks) {
  return pageSection(
    "curves",
    "Curves",
    "Point at a curve for its values. A green band is the healthy range. The line below a curve tells what " +
      "it means and what to change.",
    el(
      "div",
      { class: "grid" },
      data.overview.map((panel) => panelCard(panel, data, marks)),
    ),
  );
}

function allMetrics(data, marks) {
  const list = el(
    "div",
    { class: "card folds" },
    data.sections.map((section) => metricSection(section, data, marks)),
  );
  const none = el("p", { class: "empty", hidden: true }, "No metric matches.");
  const search = el("input", {
    type: "search",
    id: "metric-search",
    placeholder: "Search metrics",
    "aria-label": "Search metrics",
    on: {
      input: debounced(
        (event) => (none.hidden = filterMetrics(list, data.sections, data, event.target.value) > 0),
      ),
    },
  });
  return pageSection(
    "metrics",
    "All metrics",
    "Every metric that the run logged, by section, with its meaning, healthy range and the key to change.",
    el("div", { class: "toolbar metric-tools" }, search),
    list,
    none,
  );
}

function responses(data) {
  if (!data.runs.some((run) => run.samples.rows.length)) return null;
  const [title, text] = data.runs.every((run) => run.stage === "reward_model")
    ? ["Pairs", "How the model scored held-out pairs, step by step. Select a pair to read it in full."]
    : ["Responses", "What the model answered, step by step. Select an answer to read it in full."];
  return pageSection("responses", title, text, new Rollouts(data.runs).element);
}

function showReport(data) {
  const marks = marksOf(data.runs);
  const alarmed = data.runs.some((run) => run.events.some(({ kind }) => kind === "alarm"));
  const sections = [
    alarmed && events(data),
    data.overview.length > 0 && curves(data, marks),
    rewardOverKl(data),
    responses(data),
    !alarmed && events(data),
    data.sections.length > 0 && allMetrics(data, marks),
    timeAndMemory(data),
    settings(data),
  ].filter(Boolean);
  const links = sections.map((section) => [section.id, section.querySelector("h2").textContent]);
  document
    .getElementById("report")
    .append(
      data.runs.length === 1 ? headOfOne(data.runs[0], data) : headOfSeveral(data),
      el(
        "div",
        { class: "sticky no-print" },
        navigation(links),
        data.overview.length > 0 && chartControls(data, marks),
      ),
      ...sections,
      el(
        "footer",
        { class: "faint small" },
        `ppo_ds report, written ${data.written}.`,
        data.running && " The run rewrites this file; reload it for newer steps.",
      ),
    );
}

showReport(pageData());
