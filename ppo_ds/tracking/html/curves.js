// The curves: one card for each panel or metric, with its meaning, healthy range and remedy.

const DASHES = [null, "6 4", "2 3", "9 3 2 3"];
const SHOWN_MARKS = new Set(["resumed", "rolled_back", "alarm"]);

/** Returns the events of all runs that are marked in the charts. */
function marksOf(runs) {
  return runs.flatMap((run, index) =>
    run.events.filter((event) => SHOWN_MARKS.has(event.kind)).map((event) => ({ ...event, run: index })),
  );
}

/** Returns the series of a chart: all `names` (metric -> label) of all runs that have them. */
function seriesOf(runs, names, band = "") {
  const several = runs.length > 1;
  const entries = Object.entries(names);
  return entries.flatMap(([name, label], metric) =>
    runs.flatMap((run, index) => {
      const curve = run.series[name];
      if (!curve) return [];
      const target = name.endsWith("/target");
      return [{
        label: several ? (entries.length > 1 ? `${run.name}: ${label}` : run.name) : label,
        colour: seriesColour(several ? index : metric),
        dash: several ? DASHES[metric % DASHES.length] : target ? DASHES[1] : null,
        run: index,
        steps: curve.steps,
        values: curve.values,
        spread: metric === 0 && !several ? spreadOf(run.series[band], curve.steps) : null,
      }];
    }),
  );
}

/** Returns the values of `curve` at `steps`, or null if it lacks one of them. */
function spreadOf(curve, steps) {
  if (!curve) return null;
  const at = new Map(curve.steps.map((step, i) => [step, curve.values[i]]));
  return steps.every((step) => at.has(step)) ? steps.map((step) => at.get(step)) : null;
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

/** Returns the card of a panel: {title, unit, metrics: {name: label}, band, percent, fromZero}. */
function panelCard(panel, data, marks) {
  const { runs, metrics } = data;
  const series = seriesOf(runs, panel.metrics, panel.band);
  const names = Object.keys(panel.metrics).filter((name) => runs.some((run) => run.series[name]));
  const main = metrics[names[0]];
  const chart = new LineChart({
    label: `${panel.title} over steps`,
    series,
    marks,
    healthy: names.length === 1 || panel.healthyOfFirst ? (main?.healthy ?? null) : commonRange(names, metrics),
    percent: panel.percent,
    fromZero: panel.fromZero,
  });
  const only = runs.length === 1 ? runs[0].series[names[0]] : null;
  const latest = only ? metricValue({ percent: panel.percent }, only.values.at(-1)) : null;
  const legend = series.length > 1 ? el("div", { class: "legend" }, series.map(legendEntry)) : null;
  return el("figure", { class: "card chart", dataset: { names: names.join(" "), title: panel.title } },
    el("div", { class: "chart-head" },
      el("h3", {}, panel.title),
      latest && el("span", { class: "latest number" }, latest)),
    el("p", { class: "chart-unit faint small" }, panel.unit || "\u00a0"),
    chart.element,
    legend,
    aboutMetrics(names, data),
  );
}

/** Returns the healthy range of the first metric if no other metric of the chart has a different one. */
function commonRange(names, metrics) {
  const ranges = names.map((name) => metrics[name]?.healthy).filter(Boolean);
  const same = ranges.every((range) => range[0] === ranges[0][0] && range[1] === ranges[0][1]);
  return ranges.length && same ? ranges[0] : null;
}

function legendEntry(series) {
  const line = svg("svg", { width: 18, height: 8, "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, stroke: series.colour, "stroke-width": 2, "stroke-dasharray": series.dash }));
  return el("span", { class: "legend-entry", dataset: { run: series.run } }, line, series.label);
}

/** Returns the foot of a card: whether the latest values are healthy, and on request what the metrics mean. */
function aboutMetrics(names, { runs, metrics }) {
  const known = names.filter((name) => metrics[name]);
  if (!known.length) return el("div", { class: "about" }, el("code", { class: "faint" }, names.join("  ")));
  const outside = known.filter((name) =>
    runs.some((run) => healthOf(metrics[name], run.series[name]?.values.at(-1)) === "out"));
  const ranged = known.find((name) => outside.includes(name)) ?? known.find((name) => metrics[name].healthy);
  const summary = !ranged
    ? [el("span", {}, metrics[known[0]].meaning.split(". ")[0].replace(/\.$/, ""))]
    : outside.length
      ? [el("span", { class: "state warn" }, el("span", { class: "dot" }), `Outside the healthy range: ${rangeText(metrics[ranged])}`)]
      : [el("span", { class: "state good" }, el("span", { class: "dot" }), `Healthy range: ${rangeText(metrics[ranged])}`)];
  const items = known.map((name) => metricNote(name, metrics[name], outside.includes(name)));
  return el("details", { class: "about", open: outside.length > 0 }, el("summary", {}, ...summary), ...items);
}

function metricNote(name, metric, outside) {
  return el("div", { class: "note" },
    el("code", {}, name),
    el("p", {}, metric.meaning),
    metric.healthy && el("p", { class: "muted" }, `Healthy range: ${rangeText(metric)}.`),
    metric.remedy && el("p", { class: outside ? "remedy" : "muted" }, `Outside of it: ${metric.remedy}`),
  );
}

// -- all metrics, by section ----------------------------------------------------------------------------------

/** Returns a foldable section with one card for each of its metrics, which are made when it is opened. */
function metricSection(section, data, marks) {
  const cards = el("div", { class: "grid" });
  const outside = section.names.filter((name) =>
    data.runs.some((run) => healthOf(data.metrics[name], run.series[name]?.values.at(-1)) === "out"));
  const details = el("details", { class: "metric-section", dataset: { prefix: section.prefix } },
    el("summary", {},
      el("h3", {}, section.title),
      el("span", { class: "faint small" }, `${section.names.length} metric${section.names.length > 1 ? "s" : ""}`),
      outside.length > 0 && el("span", { class: "badge warn" }, `${outside.length} outside the healthy range`)),
    cards);
  details.addEventListener("toggle", () => {
    if (details.open && !cards.childElementCount) cards.append(...section.names.map((name) => metricCard(name, data, marks)));
  });
  return details;
}

function metricCard(name, data, marks) {
  const metric = data.metrics[name];
  const panel = {
    title: metric?.label ?? name,
    unit: metric?.unit ?? "",
    metrics: { [name]: metric?.label ?? name },
    percent: metric?.percent ?? false,
  };
  return panelCard(panel, data, marks);
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
    const found = section.names.filter(matches);
    count += found.length;
    details.hidden = found.length === 0;
    if (words.length === 0) continue;
    details.open = found.length > 0;
    const show = () => {
      for (const card of details.querySelectorAll(".chart")) card.hidden = !found.includes(card.dataset.names);
    };
    // the cards of a section that was closed are made by its toggle event
    if (details.querySelector(".chart")) show();
    else details.addEventListener("toggle", show, { once: true });
  }
  if (words.length === 0) for (const card of container.querySelectorAll(".chart")) card.hidden = false;
  return count;
}
