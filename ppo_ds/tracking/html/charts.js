// Charts as inline SVG: lines, stacked areas and points, with a cursor that shows values.

const SERIES_COLOURS = 8;
const HEIGHT = 190;
const PRINTED_WIDTH = 320; // pixels of a chart in one of two columns on paper
const PRINTED_WIDE = 660;
const MARGIN = { top: 12, right: 12, bottom: 24, left: 46 };
const MARK_LABELS = { resumed: "resumed", rolled_back: "rolled back", alarm: "alarm", warning: "warning" };

/** The colour of the series with this index. */
function seriesColour(index) {
  return `var(--series-${(index % SERIES_COLOURS) + 1})`;
}

// -- scales and paths ---------------------------------------------------------------------------------------

/** Returns a function from values to pixels; logarithmic if `log`. */
function makeScale(low, high, start, end, log = false) {
  const map = log ? Math.log10 : (value) => value;
  const from = map(low);
  const span = map(high) - from || 1;
  return (value) => start + ((map(value) - from) / span) * (end - start);
}

/** Returns about `count` round numbers between `low` and `high`; integers only if `whole`. */
function niceTicks(low, high, count, whole = false) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

/** Returns powers of ten between `low` and `high`, with 2 and 5 or round steps in between if there are few. */
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const factors = decades < 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / 5));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    if (power % every !== 0) continue;
    for (const factor of factors) ticks.push(factor * 10 ** power);
  }
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length > 2 ? inside : niceTicks(low, high, 4);
}

/** Returns the exponential moving average without the bias of its start, as TensorBoard draws it. */
function smoothed(values, weight) {
  if (weight <= 0) return values;
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    mean = mean * weight + (1 - weight) * value;
    total = total * weight + (1 - weight);
    return mean / total;
  });
}

/** Returns the path through the points; a null y interrupts it. */
function linePath(xs, ys) {
  let path = "";
  let drawing = false;
  xs.forEach((x, i) => {
    if (ys[i] === null) {
      drawing = false;
      return;
    }
    path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${ys[i].toFixed(1)}`;
    drawing = true;
  });
  return path;
}

/** Returns the outline of the area between two lines. */
function areaPath(xs, upper, lower) {
  const back = xs.map((_, i) => xs.length - 1 - i);
  return `${linePath(xs, upper)}${linePath(
    back.map((i) => xs[i]),
    back.map((i) => lower[i]),
  ).replace("M", "L")}Z`;
}

/** Returns the index of the value in the sorted `steps` that is nearest to `step`. */
function nearestIndex(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

/**
 * Returns the index of the value that a curve has at `step`: its last point up to there. Returns -1 before its
 * first point, and after its last point if another one was due.
 */
function indexAt(steps, step) {
  if (!steps.length || step < steps[0]) return -1;
  const nearest = nearestIndex(steps, step);
  const i = steps[nearest] > step ? nearest - 1 : nearest;
  const ended = i === steps.length - 1 && step > steps[i] && step - steps[i] >= steps[i] - (steps[i - 1] ?? steps[i]);
  return ended ? -1 : i;
}

/** Returns the smallest and the largest number, ignoring null; [0, 1] if there is none. */
function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

// -- the frame of a chart -----------------------------------------------------------------------------------

/** A chart that draws itself when it becomes visible, changes its width, or is printed. */
class Chart {
  /**
   * @param {string} label What the chart shows, for screen readers.
   * @param {number} height The height in pixels.
   */
  constructor(label, height = HEIGHT) {
    this.height = height;
    this.width = 0;
    this.visible = false;
    this.picture = svg("svg", { role: "img", "aria-label": label, class: "chart-svg", height });
    this.tip = el("div", { class: "tip", hidden: true });
    this.element = el("div", { class: "plot", tabindex: 0 }, this.picture, this.tip);
    this.element.addEventListener("pointermove", (event) => this.point(event));
    this.element.addEventListener("pointerleave", () => broadcastCursor(null));
    this.element.addEventListener("blur", () => broadcastCursor(null));
    this.element.addEventListener("keydown", (event) => this.key(event));
    charts.add(this);
    whenVisible.observe(this.element);
    whenResized.observe(this.element);
    chartOf.set(this.element, this);
  }

  get inner() {
    return {
      left: MARGIN.left,
      right: this.width - MARGIN.right,
      top: MARGIN.top,
      bottom: this.height - MARGIN.bottom,
    };
  }

  /** Draws the chart again if it is visible, `width` pixels wide. */
  redraw(width = Math.round(this.element.clientWidth)) {
    if (!this.visible || width < 60) return;
    this.width = width;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.picture.setAttribute("width", width);
    this.picture.replaceChildren();
    this.draw();
    this.cursor = svg("g", { class: "cursor" });
    this.picture.append(this.cursor);
  }

  drawAxes(x, y, xTicks, yTicks, formatX, formatY) {
    const { left, right, bottom } = this.inner;
    for (const tick of yTicks) {
      this.picture.append(
        svg("line", { class: "gridline", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
        svg("text", { class: "tick", x: left - 7, y: y(tick) + 3.5, "text-anchor": "end" }, formatY(tick)),
      );
    }
    for (const tick of xTicks) {
      this.picture.append(
        svg("text", { class: "tick", x: x(tick), y: bottom + 16, "text-anchor": "middle" }, formatX(tick)),
      );
    }
    this.picture.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  }

  point(event) {
    if (!this.x) return;
    const { left, right } = this.inner;
    const pixel = Math.min(Math.max(event.offsetX, left), right);
    this.pointAt(pixel, event);
  }

  /** Moves the cursor with the arrow keys. */
  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.steps?.length) return;
    event.preventDefault();
    const current = this.at === undefined ? 0 : nearestIndex(this.steps, this.at) + move;
    broadcastCursor(this.steps[Math.min(Math.max(current, 0), this.steps.length - 1)], this);
  }

  /** Shows the tip beside pixel `x`, in the half of the chart that the marked points leave free. */
  showTip(x, ...content) {
    this.tip.replaceChildren(...content);
    this.tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const left = x + 14 + width > this.width ? x - width - 14 : x + 14;
    const points = [...this.cursor.querySelectorAll("circle")].map((point) => point.cy.baseVal.value);
    const mean = points.reduce((sum, y) => sum + y, 0) / points.length;
    const top = mean < this.height / 2 ? this.inner.bottom - height - 6 : 6;
    this.tip.style.left = `${Math.max(0, Math.min(left, this.width - width))}px`;
    this.tip.style.top = `${Math.max(6, top)}px`;
  }

  hideCursor() {
    this.at = undefined;
    this.cursor?.replaceChildren();
    this.tip.hidden = true;
  }
}

const charts = new Set();
const chartOf = new WeakMap();
const whenVisible = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const chart = chartOf.get(entry.target);
      const appeared = entry.isIntersecting && !chart.visible;
      chart.visible = entry.isIntersecting;
      if (appeared) chart.redraw();
    }
  },
  { rootMargin: "300px" },
);
const whenResized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const chart = chartOf.get(entry.target);
    if (Math.round(entry.contentRect.width) !== chart.width) chart.redraw();
  }
});
// A printed chart is drawn for the width that it has on paper, so that its labels keep their size.
addEventListener("beforeprint", () => {
  for (const chart of charts) {
    chart.visible = true;
    chart.redraw(chart.element.closest(".wide") ? PRINTED_WIDE : PRINTED_WIDTH);
  }
});
addEventListener("afterprint", () => {
  for (const chart of charts) chart.redraw();
});

/** Shows the cursor at `step` in all visible charts, with values in `source` only; null hides it. */
function broadcastCursor(step, source = null) {
  for (const chart of charts) {
    if (!chart.visible || !chart.cursor) continue;
    if (step === null) chart.hideCursor();
    else if (chart.showStep) chart.showStep(step, chart === source);
  }
}

/** Removes charts that are no longer part of the page. */
function forgetCharts(elements) {
  for (const element of elements) {
    charts.delete(chartOf.get(element));
    whenVisible.unobserve(element);
    whenResized.unobserve(element);
  }
}

// -- lines over steps ---------------------------------------------------------------------------------------

/** View settings of all line charts. */
const view = { smoothing: 0, log: false, marks: true, hiddenRuns: new Set() };

/**
 * Lines over steps, with the healthy range as a band and marks at events.
 *
 * `spec`: {label, series: [{label, colour, run, steps, values, dash, spread}], healthy: [low, high] or null,
 * percent, fromZero, marks: [{run, step, kind, text}]}. `spread` has [low, high] of the area around a line.
 */
class LineChart extends Chart {
  constructor(spec) {
    super(spec.label);
    this.spec = spec;
    this.format = spec.percent ? formatPercent : formatNumber;
  }

  get shown() {
    return this.spec.series.filter((series) => !view.hiddenRuns.has(series.run));
  }

  /** Whether the axis is logarithmic: if asked for and most values are positive. */
  get log() {
    const values = this.shown.flatMap((series) => series.values);
    return view.log && values.length > 0 && values.filter((value) => value > 0).length * 2 > values.length;
  }

  /** The lowest and highest value of the axis. */
  domain(log) {
    const bounds = this.shown.flatMap(({ values, spread }) => {
      if (log) return [...values, ...smoothed(values, view.smoothing)]; // a mean with zeros can be lower
      return spread ? [...values, ...spread.flat()] : values;
    });
    let [low, high] = extent(log ? bounds.filter((value) => value > 0) : bounds);
    if (log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
    const span = high - low;
    // the nearer end of the healthy range, unless that would flatten the curves
    for (const end of this.spec.healthy ?? []) {
      if (end === null) continue;
      if (end > high && end - high <= span) high = end;
      if (end < low && low - end <= span) low = end;
    }
    if (this.spec.percent && high <= 1 && low >= 0) {
      if (low <= 0.35) low = 0;
      if (high >= 0.65) high = 1;
    }
    if (this.spec.fromZero && low > 0 && low < high) low = 0;
    const padding = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
    const bottom = low >= 0 && low - padding < 0 ? 0 : low - padding;
    return [bottom, this.spec.percent && high <= 1 ? Math.min(high + padding, 1.02) : high + padding];
  }

  draw() {
    const { left, right, top, bottom } = this.inner;
    const log = this.log;
    const [low, high] = this.domain(log);
    this.steps = [...new Set(this.shown.flatMap((series) => series.steps))].sort((a, b) => a - b);
    let [first, last] = extent(this.steps);
    if (first === last) [first, last] = [first - 1, last + 1];
    this.x = makeScale(first, last, left, right);
    this.y = makeScale(low, high, bottom, top, log);
    this.firstStep = first;
    this.lastStep = last;
    this.drawHealthy(low, high);
    const yTicks = log ? logTicks(low, high) : niceTicks(low, high, 5);
    const xTicks = niceTicks(first, last, Math.min(6, (right - left) / 48), true);
    const short = (value) => this.format(value, 3);
    this.drawAxes(this.x, this.y, xTicks, yTicks, (tick) => formatNumber(tick, 6), short);
    if (view.marks) this.drawMarks();
    for (const series of this.shown) this.drawSeries(series, log);
  }

  drawHealthy(low, high) {
    if (!this.spec.healthy) return;
    const [from, to] = this.spec.healthy;
    const start = Math.max(from ?? low, low);
    const end = Math.min(to ?? high, high);
    if (start >= end) return;
    const { left, right } = this.inner;
    this.picture.append(
      svg("rect", {
        class: "healthy",
        x: left,
        width: right - left,
        y: this.y(end),
        height: this.y(start) - this.y(end),
      }),
    );
  }

  drawMarks() {
    const { top, bottom } = this.inner;
    for (const mark of this.spec.marks) {
      if (view.hiddenRuns.has(mark.run) || mark.step < this.firstStep || mark.step > this.lastStep) continue;
      const x = this.x(mark.step);
      const text = `step ${mark.step}, ${MARK_LABELS[mark.kind]}: ${mark.text}`;
      this.picture.append(
        svg(
          "g",
          { class: `mark ${mark.kind}`, "data-step": mark.step },
          svg("title", {}, text),
          svg("line", { x1: x, x2: x, y1: top, y2: bottom }),
          svg("path", { d: `M${x - 4.5} ${top - 8}h9l-4.5 7z` }),
        ),
      );
    }
  }

  drawSeries(series, log) {
    const pixels = (values) => values.map((value) => (log && value <= 0 ? null : this.y(value)));
    const xs = series.steps.map(this.x);
    const style = { stroke: series.colour, "stroke-dasharray": series.dash ?? null };
    if (series.spread && !log && view.smoothing === 0) {
      const lower = pixels(series.spread.map((ends) => ends[0]));
      const upper = pixels(series.spread.map((ends) => ends[1]));
      this.picture.append(
        svg("path", { class: "spread", d: areaPath(xs, upper, lower), fill: series.colour }),
      );
    }
    if (view.smoothing > 0) {
      this.picture.append(
        svg("path", { class: "line raw", d: linePath(xs, pixels(series.values)), ...style }),
      );
    }
    const ys = pixels(smoothed(series.values, view.smoothing));
    this.picture.append(svg("path", { class: "line", d: linePath(xs, ys), ...style }));
    if (xs.length <= 12) {
      for (let i = 0; i < xs.length; i++) {
        if (ys[i] !== null)
          this.picture.append(svg("circle", { cx: xs[i], cy: ys[i], r: 2.4, fill: series.colour }));
      }
    }
  }

  pointAt(pixel) {
    const { left, right } = this.inner;
    const wanted = this.firstStep + ((pixel - left) / (right - left)) * (this.lastStep - this.firstStep);
    if (this.steps.length) broadcastCursor(this.steps[nearestIndex(this.steps, wanted)], this);
  }

  showStep(step, withValues) {
    this.hideCursor();
    if (!this.steps?.length || step < this.firstStep || step > this.lastStep) return;
    this.at = step;
    const { top, bottom } = this.inner;
    const x = this.x(step);
    this.cursor.append(svg("line", { x1: x, x2: x, y1: top, y2: bottom }));
    const log = this.log;
    const lines = [el("div", { class: "tip-head" }, `Step ${formatNumber(step, 9)}`)];
    for (const series of this.shown) {
      const i = indexAt(series.steps, step);
      if (i < 0) continue;
      const value = series.values[i];
      if (!(log && value <= 0)) {
        this.cursor.append(
          svg("circle", { cx: this.x(series.steps[i]), cy: this.y(value), r: 3.4, fill: series.colour }),
        );
      }
      const older = series.steps[i] === step ? "" : ` (step ${formatNumber(series.steps[i], 9)})`;
      lines.push(tipLine(series.colour, `${series.label}${older}`, this.format(value)));
    }
    if (!withValues) return;
    for (const mark of this.spec.marks) {
      if (mark.step === step)
        lines.push(el("div", { class: "tip-mark" }, `${MARK_LABELS[mark.kind]}: ${mark.text}`));
    }
    this.showTip(x, ...lines);
  }
}

function tipLine(colour, label, value) {
  const dot = el("span", { class: "dot" });
  dot.style.background = colour;
  return el("div", { class: "tip-line" }, dot, el("span", {}, label), el("b", { class: "number" }, value));
}

// -- stacked areas over steps -------------------------------------------------------------------------------

/** Areas on top of each other. `spec`: {label, unit, steps, parts: [{label, colour, values}]}. */
class StackChart extends Chart {
  constructor(spec) {
    super(spec.label, 230);
    this.spec = spec;
    let base = spec.steps.map(() => 0);
    this.layers = spec.parts.map((part) => {
      const lower = base;
      base = base.map((value, i) => value + part.values[i]);
      return { ...part, lower, upper: base };
    });
    this.total = base;
    this.steps = spec.steps;
  }

  draw() {
    const { left, right, top, bottom } = this.inner;
    let [first, last] = extent(this.steps);
    if (first === last) [first, last] = [first - 1, last + 1];
    this.firstStep = first;
    this.lastStep = last;
    const high = extent(this.total)[1] * 1.05 || 1;
    this.x = makeScale(first, last, left, right);
    this.y = makeScale(0, high, bottom, top);
    const single = this.steps.length === 1;
    const xs = single ? [left, right] : this.steps.map(this.x);
    const twice = (values) => (single ? [values[0], values[0]] : values);
    const xTicks = niceTicks(first, last, Math.min(6, (right - left) / 48), true);
    const [formatStep, formatValue] = [6, 3].map((digits) => (tick) => formatNumber(tick, digits));
    this.drawAxes(this.x, this.y, xTicks, niceTicks(0, high, 5), formatStep, formatValue);
    for (const layer of this.layers) {
      const [upper, lower] = [layer.upper, layer.lower].map((values) => twice(values).map(this.y));
      this.picture.append(
        svg("path", { class: "layer", d: areaPath(xs, upper, lower), fill: layer.colour }),
        svg("path", { class: "layer-edge", d: linePath(xs, upper), stroke: layer.colour }),
      );
    }
  }

  pointAt(pixel) {
    const { left, right } = this.inner;
    const wanted = this.firstStep + ((pixel - left) / (right - left)) * (this.lastStep - this.firstStep);
    broadcastCursor(this.steps[nearestIndex(this.steps, wanted)], this);
  }

  showStep(step, withValues) {
    this.hideCursor();
    if (!this.steps.length || step < this.firstStep || step > this.lastStep) return;
    this.at = step;
    const i = nearestIndex(this.steps, step);
    const { top, bottom } = this.inner;
    const x = this.x(this.steps[i]);
    this.cursor.append(svg("line", { x1: x, x2: x, y1: top, y2: bottom }));
    if (!withValues) return;
    const unit = this.spec.unit;
    const value = (number) => `${formatNumber(number, 3)} ${unit}`;
    const lines = this.layers.toReversed().filter((layer) => layer.values[i] > 0);
    this.showTip(
      x,
      el("div", { class: "tip-head" }, `Step ${formatNumber(this.steps[i], 9)}: ${value(this.total[i])}`),
      ...lines.map((layer) => tipLine(layer.colour, layer.label, value(layer.values[i]))),
    );
  }
}

// -- points -------------------------------------------------------------------------------------------------

/**
 * Points of x and y, joined in the order of their steps and darker from step to step.
 *
 * `spec`: {label, xLabel, yLabel, series: [{label, colour, run, steps, xs, ys}]}.
 */
class PathChart extends Chart {
  constructor(spec) {
    super(spec.label, 300);
    this.spec = spec;
  }

  get shown() {
    return this.spec.series.filter((series) => !view.hiddenRuns.has(series.run));
  }

  draw() {
    const { left, right, top, bottom } = this.inner;
    const pad = ([low, high]) => {
      const space = (high - low) * 0.06 || 0.5;
      return [low >= 0 ? Math.max(0, low - space) : low - space, high + space];
    };
    const [x0, x1] = pad(extent(this.shown.flatMap((series) => series.xs)));
    const [y0, y1] = pad(extent(this.shown.flatMap((series) => smoothed(series.ys, view.smoothing))));
    this.x = makeScale(x0, x1, left, right);
    this.y = makeScale(y0, y1, bottom, top);
    const short = (value) => formatNumber(value, 3);
    this.drawAxes(
      this.x,
      this.y,
      niceTicks(x0, x1, Math.min(7, (right - left) / 60)),
      niceTicks(y0, y1, 5),
      short,
      short,
    );
    this.points = this.shown.flatMap((series) => {
      const xs = smoothed(series.xs, view.smoothing).map(this.x);
      const ys = smoothed(series.ys, view.smoothing).map(this.y);
      this.picture.append(svg("path", { class: "line raw", d: linePath(xs, ys), stroke: series.colour }));
      return xs.map((x, i) => ({ x, y: ys[i], series, i, age: i / Math.max(xs.length - 1, 1) }));
    });
    for (const { x, y, series, age } of this.points) {
      this.picture.append(
        svg("circle", {
          cx: x.toFixed(1),
          cy: y.toFixed(1),
          r: 3,
          fill: series.colour,
          "fill-opacity": (0.15 + 0.85 * age).toFixed(2),
        }),
      );
    }
  }

  pointAt(pixel, event) {
    let best = null;
    for (const point of this.points) {
      const distance = Math.hypot(point.x - event.offsetX, point.y - event.offsetY);
      if (!best || distance < best.distance) best = { ...point, distance };
    }
    this.hideCursor();
    if (!best || best.distance > 60) return;
    const { series, i } = best;
    this.cursor.append(svg("circle", { cx: best.x, cy: best.y, r: 5, fill: series.colour }));
    this.showTip(
      best.x,
      el("div", { class: "tip-head" }, `Step ${formatNumber(series.steps[i], 9)}`),
      tipLine(series.colour, series.label, formatNumber(series.ys[i])),
      el(
        "div",
        { class: "tip-line faint" },
        el("span", {}, this.spec.xLabel),
        el("b", {}, formatNumber(series.xs[i])),
      ),
    );
  }
}
