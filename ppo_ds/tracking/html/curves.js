// The curves: one card for each panel or metric, with its meaning, healthy range and remedy.

const DASHES = [null, [6, 4], [2, 3], [9, 3, 2, 3]];

/** Returns the series of a chart: all metrics of the panel, of all runs that have them. */
function seriesOf(runs, panel) {
  const several = runs.length > 1;
  const entries = Object.entries(panel.metrics);
  return entries.flatMap(([name, label], metric) => runs.flatMap((run, index) => {
    const curve = run.series[name];
    if (!curve) return [];
    const full = several ? (entries.length > 1 ? `${run.name}: ${label}` : run.name) : label;
    return [{
      ...curve, label: full, run: index,
      colour: seriesColour(several ? index : metric),
      dash: several ? DASHES[metric % DASHES.length] : name.endsWith("/target") ? DASHES[1] : null,
      spread: metric === 0 && !several ? spreadOf(run, panel, curve) : null,
    }];
  }));
}

/** Returns the [low, high] area around a curve, mean +- std within the limits; null if a step has none. */
function spreadOf(run, panel, curve) {
  const band = run.series[panel.band];
  if (!band) return null;
  const spread = new Map(band.steps.map((step, i) => [step, band.values[i]]));
  if (!curve.steps.every((step) => spread.has(step))) return null;
  const limits = (panel.band_limits ?? []).map((name) => run.series[name]?.values);
  const bounded = limits.length === 2 && limits.every(Boolean);
  const [lowest, highest] = bounded ? [Math.min(...limits[0]), Math.max(...limits[1])] : [-Infinity, Infinity];
  return curve.values.map((value, i) => {
    const deviation = spread.get(curve.steps[i]);
    return [Math.max(value - deviation, Math.min(lowest, value)), Math.min(value + deviation, Math.max(highest, value))];
  });
}

/** Returns those of the metrics whose latest value of a run is outside the healthy range. */
function unhealthy(names, { runs, metrics }) {
  return names.filter((name) => runs.some((run) => {
    const [low, high] = metrics[name]?.healthy ?? [null, null];
    const value = run.series[name]?.values.at(-1);
    return Number.isFinite(value) && ((low !== null && value < low) || (high !== null && value > high));
  }));
}

/** Returns the healthy range as text: "0.1 to 0.3", "at most 0.2", "at least 0.5". */
function rangeText({ healthy, percent }) {
  const [low, high] = healthy.map((end) => end !== null && (percent ? formatPercent : formatNumber)(end, 3));
  if (!low) return `at most ${high}`;
  return !high ? `at least ${low}` : low === high ? low : `${low} to ${high}`;
}

/** Returns the card of a panel; report.py makes the panels. */
function panelCard(panel, data) {
  const { runs, metrics, marks } = data;
  const series = seriesOf(runs, panel);
  const names = Object.keys(panel.metrics).filter((name) => runs.some((run) => run.series[name]));
  const percent = panel.percent || names.every((name) => metrics[name]?.percent);
  const ranges = names.map((name) => metrics[name]?.healthy).filter(Boolean);
  const healthy = ranges.every((range) => String(range) === String(ranges[0])) ? ranges[0] : null;
  const chart = lineChart({ label: `${panel.title} over steps`, series, marks, healthy, percent, fromZero: panel.from_zero });
  const latest = runs.length === 1 && runs[0].series[names[0]].values.at(-1);
  return h("figure.card.chart", { dataset: { names: names.join(" "), title: panel.title } },
    h("div.chart-head", h("h3", panel.title),
      runs.length === 1 && h("span.latest.number", (percent ? formatPercent : formatNumber)(latest, 3))),
    h("p.chart-unit.faint.small", panel.unit || "\u00a0"),
    chart.element,
    series.length > 1 && legend(series),
    aboutMetrics(names, data));
}

/**
 * Returns the foot of a card: whether the latest values are healthy, what to do if they are not, and on
 * request what the metrics mean.
 */
function aboutMetrics(names, data) {
  const { metrics } = data;
  const known = names.filter((name) => metrics[name]);
  if (!known.length) return h("div.about", h("code.faint", names.join("  ")));
  const outside = unhealthy(known, data);
  const ranged = outside[0] ?? known.find((name) => metrics[name].healthy);
  let summary = h("span", markdown(firstSentence(metrics[known[0]].meaning)));
  if (ranged) {
    const which = known.length > 1 ? ` of ${metrics[ranged].label}` : "";
    const [kind, text] = outside.length ? ["warn", "Outside the healthy range"] : ["good", "Healthy range"];
    summary = h(`span.state.${kind}`, h("span.dot"), `${text}${which}: ${rangeText(metrics[ranged])}`);
  }
  const remedies = outside.map((name) => metrics[name].remedy).filter(Boolean);
  return h("div.about",
    h("details", h("summary", summary), known.map((name) => metricNote(name, metrics[name]))),
    remedies.map((remedy) => h("p.remedy", markdown(remedy))));
}

/** Returns a text up to its first full stop, without what is in brackets, with a capital first letter. */
function firstSentence(text) {
  const bare = text.replace(/^stage=\w+: /, "").replace(/ \([^()]*(\([^()]*\)[^()]*)*\)/g, "");
  const sentence = bare.split(/\. |\.$|; /)[0];
  return sentence.charAt(0).toUpperCase() + sentence.slice(1);
}

function metricNote(name, metric) {
  const reason = metric.reason ? [" (", ...markdown(metric.reason), ")"] : [];
  return h("div.note", h("code", name), h("p", markdown(metric.meaning)),
    metric.healthy && h("p.muted", `Healthy range: ${rangeText(metric)}`, reason, "."),
    metric.remedy && h("p.muted", metric.healthy ? "Outside of it: " : "What to do: ", markdown(metric.remedy)));
}

/** Returns a text of the catalogue, which may have `code` and [links](https://...), as elements. */
function markdown(text) {
  return text.split(/(`[^`]+`|\[[^\]]+\]\(https?:[^)]+\))/).map((part) => {
    if (part.startsWith("`") && part.length > 1) return h("code", part.slice(1, -1));
    const link = /^\[([^\]]+)\]\((https?:[^)]+)\)$/.exec(part);
    return link ? h("a", { href: link[2], rel: "noreferrer" }, link[1]) : part;
  });
}

/** Returns a foldable section with its cards, which are made when it is opened. */
function metricSection(section, data) {
  const cards = h("div.grid");
  const names = [...new Set(section.cards.flatMap((card) => Object.keys(card.metrics)))];
  const outside = unhealthy(names, data).length;
  const element = h("details.metric-section", { dataset: { prefix: section.prefix } },
    h("summary", h("h3", section.title),
      h("span.faint.small", `${names.length} metric${names.length > 1 ? "s" : ""}`),
      outside > 0 && h("span.badge.warn", `${outside} outside the healthy range`)),
    cards);
  const fill = () => {
    if (!cards.childElementCount) cards.append(...section.cards.map((panel) => panelCard(panel, data)));
  };
  element.addEventListener("toggle", () => element.open && fill());
  return { element, names, cards, fill };
}

/** Shows the sections and cards whose names or meanings contain `query`; returns whether there are any. */
function filterMetrics(sections, data, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (name) => {
    const metric = data.metrics[name];
    const text = `${name} ${metric?.label ?? ""} ${metric?.meaning ?? ""}`.toLowerCase();
    return words.every((word) => text.includes(word));
  };
  for (const { element, names, cards, fill } of sections) {
    const found = names.filter(matches);
    element.hidden = found.length === 0;
    if (words.length) element.open = found.length > 0;
    if (element.open) fill();
    for (const card of cards.children) card.hidden = !card.dataset.names.split(" ").some((name) => found.includes(name));
  }
  return sections.some(({ element }) => !element.hidden);
}
