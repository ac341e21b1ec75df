// Charts on uPlot: lines over steps, and points, with a cursor that shows values.

const MARK_LABELS = { resumed: "resumed", rolled_back: "rolled back", alarm: "alarm", warning: "warning" };
const WHOLE = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power));

/** View settings of all charts. */
const view = { smoothing: 0, log: false, marks: true, hiddenRuns: new Set() };
const charts = new Set();
let active = null; // the chart under the pointer, or the one that keys move in

/** The colour of the series with this index. */
function seriesColour(index) {
  return `var(--series-${(index % 8) + 1})`;
}

const paints = new Map();
const probe = h("span", { hidden: true });
document.body.append(probe);

/** Returns a colour of the style sheets as a canvas needs it, in the current theme. */
function paint(colour, percent = 100) {
  const key = `color-mix(in srgb, ${colour} ${percent}%, transparent)`;
  probe.style.color = key;
  if (!paints.has(key)) paints.set(key, getComputedStyle(probe).color);
  return paints.get(key);
}

/** Returns the exponential moving average without the bias of its start, as TensorBoard draws it. */
function smoothed(values, weight = view.smoothing) {
  let [mean, total] = [0, 0];
  return values.map((value) => {
    mean = mean * weight + (1 - weight) * value;
    total = total * weight + (1 - weight);
    return mean / total;
  });
}

/**
 * A chart that draws itself when it has a width, and again when its width, the theme or the view changes.
 *
 * `build` returns what is drawn: {data, series, bands, x, y, ticks, format, sync, points, below, above, tip};
 * `tip` returns [heading, lines of tipLine, y of the marked points].
 */
class Chart {
  constructor(label, build, height = 190) {
    Object.assign(this, { build, height, tip: h("div.tip", { hidden: true }) });
    const on = {
      pointerenter: () => (active = this),
      keydown: (event) => this.key(event),
      blur: () => this.plot?.setCursor({ left: -10, top: -10 }, true, true),
    };
    const style = { minHeight: `${height}px` };
    this.element = h("div.plot", { tabindex: 0, role: "img", "aria-label": label, on, style }, this.tip);
    this.element.chart = this;
    charts.add(this);
    whenResized.observe(this.element);
  }

  draw(width = Math.round(this.element.clientWidth)) {
    const old = this.plot?.scales.x;
    const zoom = old && (old.min > this.range[0] || old.max < this.range[1]) && { min: old.min, max: old.max };
    this.plot?.destroy();
    this.plot = null;
    this.tip.hidden = true;
    this.width = width;
    if (width < 60) return;
    this.drawn = this.build();
    this.plot = new uPlot(this.options(this.drawn, width), this.drawn.data, this.element);
    this.range = [this.plot.scales.x.min, this.plot.scales.x.max];
    if (zoom) this.plot.setScale("x", zoom);
  }

  /** Returns the options of uPlot. */
  options({ series, bands, x, y, ticks, format, sync, points, below, above }, width) {
    const axis = { stroke: () => paint("var(--text-3)"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: () => paint("var(--border)"), width: 1 };
    const values = (digits, form) => (_, splits) => splits.map((tick) => (tick === null ? "" : form(tick, digits)));
    return {
      width, height: this.height, padding: [12, 12, 0, 0], legend: { show: false },
      series: [{}, ...series], bands,
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]), ...x }, y },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: 48, values: values(6, formatNumber), ...ticks },
        { ...axis, grid, size: 50, gap: 6, space: 30, values: values(3, format) },
      ],
      cursor: { y: false, points, hover: { bias: -1 }, sync: sync && { key: "steps", scales: ["x", null] } },
      hooks: { drawClear: [below ?? (() => {})], draw: [above ?? (() => {})], setCursor: [(plot) => this.showTip(plot)] },
    };
  }

  /** Moves the cursor with the arrow keys. */
  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.plot?.data[0].length) return;
    event.preventDefault();
    active = this;
    const [xs, at] = [this.plot.data[0], this.plot.cursor.idx];
    const next = at === null || at === undefined ? 0 : Math.min(Math.max(at + move, 0), xs.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(xs[next], "x"), top: 0 }, true, true);
  }

  /** Shows the values at the cursor, in the half of the chart that the marked points leave free. */
  showTip(plot) {
    const content = active === this && Number.isInteger(plot.cursor.idx) && this.drawn.tip(plot);
    this.tip.hidden = !content;
    if (!content) return;
    const [heading, lines, ys] = content;
    this.tip.replaceChildren(h("div.tip-head", heading), ...lines);
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const x = plot.over.offsetLeft + plot.cursor.left;
    const left = x + 14 + width > this.width ? x - width - 14 : x + 14;
    const above = ys.reduce((sum, y) => sum + y, 0) / ys.length < plot.over.clientHeight / 2;
    this.tip.style.left = `${Math.max(0, Math.min(left, this.width - width))}px`;
    this.tip.style.top = `${Math.max(6, above ? this.height - 34 - height : 6)}px`;
  }
}

const whenResized = new ResizeObserver((entries) => {
  for (const { target } of entries) if (Math.round(target.clientWidth) !== target.chart.width) target.chart.draw();
});

/** Draws all charts again. */
function redraw() {
  paints.clear();
  for (const chart of charts) chart.draw();
}
document.addEventListener("themechange", redraw);

function tipLine(colour, label, value) {
  return h("div.tip-line", h("span.dot", { style: { color: colour } }), h("span", label), h("b.number", value));
}

function legend(entries) {
  const line = (entry) => h("span.line", { style: { borderTop: `2px ${entry.dash ? "dashed" : "solid"} ${entry.colour}` } });
  return h("div.legend", entries.map((entry) => h("span.legend-entry", line(entry), entry.label)));
}

/**
 * Returns a chart of lines over steps, with the healthy range as a band and marks at events.
 *
 * `spec`: {label, series: [{label, colour, run, steps, values, dash, spread}], healthy: [low, high] or null,
 * percent, fromZero, marks: [{run, step, kind, text}], x}. `spread` has [low, high] of the area around a line;
 * `x`: {name, ticks} of a logarithmic axis of something else than steps.
 */
function lineChart(spec) {
  const format = spec.percent ? formatPercent : formatNumber;
  const build = () => {
    const shown = spec.series.filter((series) => !view.hiddenRuns.has(series.run));
    const all = shown.flatMap((series) => series.values);
    const log = view.log && all.filter((value) => value > 0).length * 2 > all.length;
    const layers = shown.flatMap((series) => layersOf(series, log));
    const data = layers.length ? uPlot.join(layers.map((layer) => [layer.steps, layer.values])) : [[]];
    const bands = layers.flatMap((layer, i) =>
      layer.upper ? [{ series: [i + 1, i + 2], fill: () => paint(layer.colour, 13) }] : []);
    const marks = spec.marks.filter((mark) => view.marks && !view.hiddenRuns.has(mark.run));
    const tip = (plot) => {
      const [xs, at] = [plot.data[0], plot.cursor.idx];
      const found = layers.flatMap(({ series }, i) => {
        const index = series && plot.cursor.idxs[i + 1];
        return Number.isInteger(index) ? [{ series, step: xs[index], y: plot.valToPos(plot.data[i + 1][index], "y") }] : [];
      });
      const lines = found.map(({ series, step }) => tipLine(series.colour,
        step === xs[at] ? series.label : `${series.label} (step ${formatNumber(step, 9)})`,
        format(series.values[series.steps.indexOf(step)])));
      const here = marks.filter(({ step }) => step <= xs[at] && step > (xs[at - 1] ?? -Infinity));
      lines.push(...here.map((mark) => h("div.tip-mark", `${MARK_LABELS[mark.kind]}: ${mark.text}`)));
      return [`${spec.x?.name ?? "Step"} ${formatNumber(xs[at], 9)}`, lines, found.map(({ y }) => y)];
    };
    return {
      data, bands, marks, tip, format,
      series: layers.map((layer) => layer.options),
      x: spec.x && { distr: 3, log: 2, range: (_, low, high) => [low, high] },
      y: { distr: log ? 3 : 1, range: (_, low, high) => domain(low, high, spec, log) },
      ticks: spec.x ? { splits: () => spec.x.ticks, filter: (_, splits) => splits } : { incrs: WHOLE },
      sync: !spec.x,
      points: { size: (plot, i) => (layers[i - 1].series ? 7 : 0) },
      below: (plot) => spec.healthy && fillRange(plot, spec.healthy),
      above: (plot) => drawMarks(plot, marks),
    };
  };
  return new Chart(spec.label, build);
}

/** Returns the curves that draw a series; the one with `series` has its values for the cursor. */
function layersOf(series, log) {
  const { steps, colour, spread, dash } = series;
  const layer = (values, more, options) => ({
    steps, colour, ...more,
    values: log ? values.map((value) => (value > 0 ? value : null)) : values,
    options: { stroke: () => paint(colour), dash, points: { show: false }, ...options },
  });
  const points = { show: steps.length <= 12, size: 5, fill: () => paint(colour) };
  if (view.smoothing > 0) {
    const pale = { stroke: () => paint(colour, 32), width: 1 };
    return [layer(series.values, { series }, pale), layer(smoothed(series.values), {}, { width: 1.8, points })];
  }
  const end = (i) => layer(spread.map((ends) => ends[i]), { upper: i === 1 }, { width: 0 });
  return [...(spread && !log ? [end(1), end(0)] : []), layer(series.values, { series }, { width: 1.8, points })];
}

/** Returns the ends of the axis for values from `low` to `high`. */
function domain(low, high, { healthy, percent, fromZero }, log) {
  if (low === null) return log ? [1, 10] : [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
  const span = high - low;
  // the nearer end of the healthy range, unless that would flatten the curves
  for (const end of (healthy ?? []).filter((each) => each !== null)) {
    if (end > high && end - high <= span) high = end;
    if (end < low && low - end <= span) low = end;
  }
  if (percent && high <= 1 && low >= 0) {
    if (low <= 0.35) low = 0;
    if (high >= 0.65) high = 1;
  }
  if (fromZero && low > 0 && low < high) low = 0;
  const padding = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  const top = percent && high <= 1 ? Math.min(high + padding, 1.02) : high + padding;
  return [low >= 0 && low - padding < 0 ? 0 : low - padding, top];
}

function fillRange(plot, [from, to]) {
  const { min, max } = plot.scales.y;
  const [start, end] = [Math.max(from ?? min, min), Math.min(to ?? max, max)];
  if (start >= end) return;
  const [top, bottom] = [end, start].map((value) => plot.valToPos(value, "y", true));
  plot.ctx.fillStyle = paint("var(--band)");
  plot.ctx.fillRect(plot.bbox.left, top, plot.bbox.width, bottom - top);
}

/** Draws a dashed line and a triangle at the step of each mark. */
function drawMarks({ ctx, bbox, scales, valToPos }, marks) {
  const size = uPlot.pxRatio;
  ctx.save();
  ctx.lineWidth = size;
  ctx.setLineDash([2 * size, 3 * size]);
  for (const { step, kind } of marks.filter((mark) => mark.step >= scales.x.min && mark.step <= scales.x.max)) {
    const x = valToPos(step, "x", true);
    ctx.strokeStyle = ctx.fillStyle = paint(kind === "alarm" ? "var(--warn)" : "var(--text-3)");
    ctx.stroke(new Path2D(`M${x} ${bbox.top}v${bbox.height}`));
    ctx.fill(new Path2D(`M${x - 4.5 * size} ${bbox.top - 8 * size}h${9 * size}l${-4.5 * size} ${7 * size}z`));
  }
  ctx.restore();
}

/**
 * Returns a chart of points of x and y, joined in the order of their steps and darker from step to step.
 *
 * `spec`: {label, xLabel, series: [{label, colour, run, steps, xs, ys}]}.
 */
function pathChart(spec) {
  const pad = (_, low, high) => {
    const space = (high - low) * 0.06 || 0.5;
    return [low >= 0 ? Math.max(0, low - space) : low - space, high + space];
  };
  const build = () => {
    const shown = spec.series.filter((series) => !view.hiddenRuns.has(series.run));
    const points = shown.flatMap((series) => {
      const [xs, ys] = [smoothed(series.xs), smoothed(series.ys)];
      return xs.map((x, i) => ({ x, y: ys[i], series, i, age: i / Math.max(xs.length - 1, 1) }));
    });
    const sorted = points.toSorted((a, b) => a.x - b.x);
    const tip = (plot) => {
      const { series, i, y } = sorted[plot.cursor.idx];
      const lines = [tipLine(series.colour, series.label, formatNumber(series.ys[i])),
        tipLine("transparent", spec.xLabel, formatNumber(series.xs[i]))];
      return [`Step ${formatNumber(series.steps[i], 9)}`, lines, [plot.valToPos(y, "y")]];
    };
    return {
      data: [sorted.map(({ x }) => x), sorted.map(({ y }) => y)],
      series: [{ stroke: () => paint("var(--text-3)"), paths: () => null, points: { show: false } }],
      x: { range: pad }, y: { range: pad }, ticks: {}, format: formatNumber, tip, sorted,
      above: (plot) => drawPoints(plot, points),
    };
  };
  return new Chart(spec.label, build, 300);
}

function drawPoints({ ctx, valToPos }, points) {
  const at = ({ x, y }) => [valToPos(x, "x", true), valToPos(y, "y", true)];
  points.forEach((point, k) => {
    const colour = point.series.colour;
    ctx.strokeStyle = paint(colour, 32);
    if (point.i) ctx.stroke(new Path2D(`M${at(points[k - 1])}L${at(point)}`));
    ctx.fillStyle = paint(colour, Math.round(15 + 85 * point.age));
    ctx.beginPath();
    ctx.arc(...at(point), 3 * uPlot.pxRatio, 0, 7);
    ctx.fill();
  });
}
