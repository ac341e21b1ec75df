// Helpers of all pages: the data, elements, controls, and numbers as text.
// Text of prompts and responses only enters the page as textContent or as an attribute's value.

const MINUS = "\u2212";
const MISSING = "\u2013";

/** Returns the data that render_page was given, in objects that have no other names, such as "constructor". */
function pageData() {
  const bare = (_, value) => (value instanceof Object && !Array.isArray(value) ? Object.assign(Object.create(null), value) : value);
  return JSON.parse(document.getElementById("page-data").textContent, bare);
}

/**
 * Makes an element: h("td.number", {title: "all"}, "12"). The attributes can be left out, and `dataset`, `on`
 * (event -> listener) and `style` are objects. Children that are null or false are left out.
 */
function h(selector, ...rest) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  const plain = rest[0]?.constructor === Object;
  const { dataset = {}, on = {}, style = {}, ...attributes } = plain ? rest[0] : {};
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("aria-")) element.setAttribute(name, String(value)); // "false" differs from absent
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value === true ? "" : String(value));
  }
  Object.assign(element.dataset, dataset);
  Object.assign(element.style, style);
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  const children = (plain ? rest.slice(1) : rest).flat(2);
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Makes a table; columns whose heading ends with "#" hold numbers. `rows` are lists of cells, or elements. */
function table(header, rows) {
  const cell = (tag) => (content, i) => h(header[i].endsWith("#") ? `${tag}.number` : tag, content);
  const heads = header.map((text) => text.replace(/#$/, "")).map(cell("th"));
  const lines = rows.map((row) => (Array.isArray(row) ? h("tr", row.map(cell("td"))) : row));
  return h("div.table-wrap", h("table", h("thead", h("tr", heads)), h("tbody", lines)));
}

/** Makes a button that is on or off; `change` returns its new state. */
function chip(label, pressed, change, attributes = {}) {
  const click = (event) => event.currentTarget.setAttribute("aria-pressed", change());
  return h("button.chip", { "aria-pressed": pressed, on: { click }, ...attributes }, label);
}

/** Makes buttons of which one is pressed; `options` are [value, label]. */
function segmented(label, options, chosen, choose) {
  const buttons = options.map(([value, text]) => {
    const click = () => {
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", options[i][0] === value));
      choose(value);
    };
    return h("button", { "aria-pressed": value === chosen, dataset: { value }, on: { click } }, text);
  });
  return h("div.segmented", { role: "group", "aria-label": label }, buttons);
}

function select(label, options, chosen, choose) {
  const change = (event) => choose(event.target.value);
  return h("select", { "aria-label": label, on: { change } },
    options.map(([value, text]) => h("option", { value, selected: value === chosen }, text)));
}

/** Makes a field; `listener` gets its text once no key was pressed for a while. */
function field(type, label, listener, attributes = {}) {
  let timer;
  const input = (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => listener(event.target.value), 120);
  };
  return h("input", { type, placeholder: label, "aria-label": label, on: { input }, ...attributes });
}

/** Formats a number with `digits` significant digits, without needless zeros: 0.0123, 1.5, 12,400, 3.1e-7. */
function formatNumber(value, digits = 4) {
  if (!Number.isFinite(value)) return MISSING;
  if (value === 0) return "0";
  const size = Number(Math.abs(value).toPrecision(digits + 3)); // 52.7499999 is 52.75
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  const text = size < 1e-4 || size >= 1e9
    ? size.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e").replace("e+", "e")
    : size.toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 8) });
  return (value < 0 ? MINUS : "") + text;
}

/** Formats a fraction as a percentage: 0.125 -> 12.5 %. */
function formatPercent(value, digits = 3) {
  return Number.isFinite(value) ? `${formatNumber(100 * value, digits)}\u202f%` : MISSING;
}
