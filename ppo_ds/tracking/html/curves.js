// The curves: one card for each panel or metric, with its meaning, healthy range and remedy.

const DASHES = [null, "6 4", "2 3", "9 3 2 3"];
const SHOWN_MARKS = new Set(["resumed", "rolled_back", "alarm"]);

/** Returns the events of all runs that are marked in the charts. */
function marksOf(runs) {
  return runs.flatMap((run, index) =>
    run.events.filter((event) => SHOWN_MARKS.has(event.kind)).map((event) => ({ ...event, run: index })),
  );
}

/** Returns the series of a chart: all metrics of the panel, of all runs that have them. */
function seriesOf(runs, panel) {
  const several = runs.length > 1;
  const entries = Object.entries(panel.metrics);
  return entries.flatMap(([name, label], metric) =>
    runs.flatMap((run, index) => {
      const curve = run.series[name];
      if (!curve) return [];
      const target = name.endsWith("/target");
      return [
        {
          label: several ? (entries.length > 1 ? `${run.name}: ${label}` : run.name) : label,
          colour: seriesColour(several ? index : metric),
          dash: several ? DASHES[metric % DASHES.length] : target ? DASHES[1] : null,
          run: index,
          steps: curve.steps,
          values: curve.values,
          spread: metric === 0 && !several ? spreadOf(run, panel, curve) : null,
        },
      ];
    }),
  );
}

/** Returns the [low, high] area around a curve, mean +- std within the limits; null if a step has none. */
function spreadOf(run, panel, curve) {
  const band = run.series[panel.band];
  if (!band) return null;
  const spread = new Map(band.steps.map((step, i) => [step, band.values[i]]));
  if (!curve.steps.every((step) => spread.has(step))) return null;
  const limits = (panel.bandLimits ?? []).map((name) => run.series[name]);
  const [lowest, highest] =
    limits.length === 2 && limits.every(Boolean)
      ? [Math.min(...limits[0].values), Math.max(...limits[1].values)]
      : [-Infinity, Infinity];
  return curve.steps.map((step, i) => {
    const [value, deviation] = [curve.values[i], spread.get(step)];
    return [
      Math.max(value - deviation, Math.min(lowest, value)),
      Math.min(value + deviation, Math.max(highest, value)),
    ];
  });
}

/** Returns "good" or "out" for a value inside or outside the healthy range of a metric, else null. */
function healthOf(metric, value) {
  if (!metric?.healthy || !Number.isFinite(value)) return null;
  const [low, high] = metric.healthy;
  return (low === null || value >= low) && (high === null || value <= high) ? "good" : "out";
}

/** Returns the healthy range as text: "0.1 to 0.3", "at most 0.2", "at least 0.5". */
function rangeText(metric) {
  const [low, high] = metric.healthy.map((end) => (end === null ? null : metricValue(metric, end, 3)));
  if (low === null) return `at most ${high}`;
  return high === null ? `at least ${low}` : low === high ? low : `${low} to ${high}`;
}

/** Formats a value of a metric. */
function metricValue(metric, value, digits = 4) {
  return metric?.percent ? formatPercent(value, digits) : formatNumber(value, digits);
}

/** Returns the card of a panel; report.py makes the panels. */
function panelCard(panel, data, marks) {
  const { runs, metrics } = data;
  const series = seriesOf(runs, panel);
  const names = Object.keys(panel.metrics).filter((name) => runs.some((run) => run.series[name]));
  const percent = panel.percent || names.every((name) => metrics[name]?.percent);
  const chart = new LineChart({
    label: `${panel.title} over steps`,
    series,
    marks,
    healthy: commonRange(names, metrics),
    percent,
    fromZero: panel.fromZero,
  });
  const only = runs.length === 1 ? runs[0].series[names[0]] : null;
  const latest = only ? metricValue({ percent }, only.values.at(-1), 3) : null;
  const legend = series.length > 1 ? el("div", { class: "legend" }, series.map(legendEntry)) : null;
  return el(
    "figure",
    { class: "card chart", dataset: { names: names.join(" "), title: panel.title } },
    el(
      "div",
      { class: "chart-head" },
      el("h3", {}, panel.title),
      latest && el("span", { class: "latest number" }, latest),
    ),
    el("p", { class: "chart-unit faint small" }, panel.unit || "\u00a0"),
    chart.element,
    legend,
    aboutMetrics(names, data),
  );
}

/** Returns the healthy range that the metrics of a chart have in common; null if they differ. */
function commonRange(names, metrics) {
  const ranges = names.map((name) => metrics[name]?.healthy).filter(Boolean);
  const same = ranges.every((range) => range[0] === ranges[0][0] && range[1] === ranges[0][1]);
  return ranges.length && same ? ranges[0] : null;
}

function legendEntry(series) {
  const line = svg(
    "svg",
    { width: 18, height: 8, "aria-hidden": "true" },
    svg("line", {
      x1: 0,
      x2: 18,
      y1: 4,
      y2: 4,
      stroke: series.colour,
      "stroke-width": 2,
      "stroke-dasharray": series.dash,
    }),
  );
  return el("span", { class: "legend-entry", dataset: { run: series.run } }, line, series.label);
}

/**
 * Returns the foot of a card: whether the latest values are healthy, what to do if they are not, and on
 * request what the metrics mean.
 */
function aboutMetrics(names, { runs, metrics }) {
  const known = names.filter((name) => metrics[name]);
  if (!known.length) return el("div", { class: "about" }, el("code", { class: "faint" }, names.join("  ")));
  const outside = known.filter((name) =>
    runs.some((run) => healthOf(metrics[name], run.series[name]?.values.at(-1)) === "out"),
  );
  const ranged = known.find((name) => outside.includes(name)) ?? known.find((name) => metrics[name].healthy);
  let summary = el("span", {}, ...markdown(firstSentence(metrics[known[0]].meaning)));
  if (ranged) {
    const which = known.length > 1 ? ` of ${metrics[ranged].label}` : "";
    const [kind, text] = outside.length ? ["warn", "Outside the healthy range"] : ["good", "Healthy range"];
    const range = `${text}${which}: ${rangeText(metrics[ranged])}`;
    summary = el("span", { class: `state ${kind}` }, el("span", { class: "dot" }), range);
  }
  const remedies = outside.map((name) => metrics[name].remedy).filter(Boolean);
  return el(
    "div",
    { class: "about" },
    el(
      "details",
      {},
      el("summary", {}, summary),
      known.map((name) => metricNote(name, metrics[name])),
    ),
    remedies.map((remedy) => el("p", { class: "remedy" }, ...markdown(remedy))),
  );
}

/** Returns a text up to its first full stop, without what is in brackets, with a capital first letter. */
function firstSentence(text) {
  const bare = text.replace(/^stage=\w+: /, "").replace(/ \([^()]*(\([^()]*\)[^()]*)*\)/g, "");
  const sentence = bare.split(/\. |\.$|; /)[0];
  return sentence.charAt(0).toUpperCase() + sentence.slice(1);
}

function metricNote(name, metric) {
  const remedyLabel = metric.healthy ? "Outside of it: " : "What to do: ";
  return el(
    "div",
    { class: "note" },
    el("code", {}, name),
    el("p", {}, ...markdown(metric.meaning)),
    metric.healthy &&
      el(
        "p",
        { class: "muted" },
        `Healthy range: ${rangeText(metric)}`,
        ...(metric.reason ? [" (", ...markdown(metric.reason), ")"] : []),
        ".",
      ),
    metric.remedy && el("p", { class: "muted" }, remedyLabel, ...markdown(metric.remedy)),
  );
}

/** Returns a text of the catalogue, which may have `code` and [links](https://...), as elements. */
function markdown(text) {
  return text.split(/(`[^`]+`|\[[^\]]+\]\(https?:[^)]+\))/).map((part) => {
    if (part.startsWith("`") && part.length > 1) return el("code", {}, part.slice(1, -1));
    const link = /^\[([^\]]+)\]\((https?:[^)]+)\)$/.exec(part);
    return link ? el("a", { href: link[2], rel: "noreferrer" }, link[1]) : part;
  });
}

// -- all metrics, by section --------------------------------------------------------------------------------

/** Returns the names of the metrics of a section. */
function sectionNames(section) {
  return [...new Set(section.cards.flatMap((card) => Object.keys(card.metrics)))];
}

/** Returns a foldable section with its cards, which are made when it is opened. */
function metricSection(section, data, marks) {
  const cards = el("div", { class: "grid" });
  const names = sectionNames(section);
  const outside = names.filter((name) =>
    data.runs.some((run) => healthOf(data.metrics[name], run.series[name]?.values.at(-1)) === "out"),
  );
  const details = el(
    "details",
    { class: "metric-section", dataset: { prefix: section.prefix } },
    el(
      "summary",
      {},
      el("h3", {}, section.title),
      el("span", { class: "faint small" }, `${names.length} metric${names.length > 1 ? "s" : ""}`),
      outside.length > 0 &&
        el("span", { class: "badge warn" }, `${outside.length} outside the healthy range`),
    ),
    cards,
  );
  details.addEventListener("toggle", () => {
    if (details.open && !cards.childElementCount)
      cards.append(...section.cards.map((panel) => panelCard(panel, data, marks)));
  });
  return details;
}

/** Shows the sections and cards whose names, titles or meanings contain `query`. */
function filterMetrics(container, sections, data, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (name) => {
    const metric = data.metrics[name];
    const text = `${name} ${metric?.label ?? ""} ${metric?.meaning ?? ""}`.toLowerCase();
    return words.every((word) => text.includes(word));
  };
  let count = 0;
  for (const section of sections) {
    const details = container.querySelector(`[data-prefix="${CSS.escape(section.prefix)}"]`);
    const found = sectionNames(section).filter(matches);
    count += found.length;
    details.hidden = found.length === 0;
    if (words.length === 0) continue;
    details.open = found.length > 0;
    const show = () => {
      for (const card of details.querySelectorAll(".chart"))
        card.hidden = !card.dataset.names.split(" ").some((name) => found.includes(name));
    };
    // the cards of a section that was closed are made by its toggle event
    if (details.querySelector(".chart")) show();
    else details.addEventListener("toggle", show, { once: true });
  }
  if (words.length === 0) for (const card of container.querySelectorAll(".chart")) card.hidden = false;
  return count;
}
