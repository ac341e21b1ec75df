// Helpers of all pages: the data, elements, and numbers as text.
// Text of prompts and responses only enters the page as textContent or as an attribute's value.

const SVG = "http://www.w3.org/2000/svg";
const MINUS = "\u2212";
const MISSING = "\u2013";

/** Returns the data that render_page was given. */
function pageData() {
  return JSON.parse(document.getElementById("page-data").textContent);
}

/** Makes an HTML element. `attributes` may also hold `dataset` and `on` (event -> listener). */
function el(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** Makes an SVG element; otherwise like `el`. */
function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(element, { dataset = {}, on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("aria-"))
      element.setAttribute(name, String(value)); // "false" differs from absent
    else if (value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  Object.assign(element.dataset, dataset);
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  element.append(
    ...children.flat().filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Formats a number with `digits` significant digits, without needless zeros: 0.0123, 1.5, 12,400, 3.1e-7. */
function formatNumber(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return MISSING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (size < 1e-4 || size >= 1e9) {
    text = size
      .toExponential(Math.max(0, digits - 2))
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  } else {
    const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    text = size.toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 8) });
  }
  return (value < 0 ? MINUS : "") + text;
}

/** Formats a fraction as a percentage: 0.125 -> 12.5 %. */
function formatPercent(value, digits = 3) {
  return Number.isFinite(value) ? `${formatNumber(100 * value, digits)}\u202f%` : MISSING;
}

/** Formats seconds as 0.4 s, 42 s, 4 min 12 s, 3 h 5 min or 2 d 4 h. */
function formatDuration(seconds) {
  if (!Number.isFinite(seconds)) return MISSING;
  if (seconds < 10) return `${formatNumber(seconds, 2)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const seconds60 = whole % 60 ? ` ${whole % 60} s` : "";
  if (whole < 3600) return `${Math.floor(whole / 60)} min${seconds60}`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Calls `listener` once no call came for `milliseconds`: for text fields that filter long lists. */
function debounced(listener, milliseconds = 120) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => listener(...values), milliseconds);
  };
}
