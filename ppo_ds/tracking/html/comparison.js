// The page of an evaluation: figures of each model, and the responses to each prompt side by side.

const { summary, rows, rows_total: rowsTotal } = pageData();
const models = Object.keys(summary.responses);
const first = models[0];
const rewards = Object.keys(summary.rewards ?? {});
const others = models.slice(1);
// A criterion ranks responses: a reward, or the judge, which only compares with the first model.
const criteria = [
  ...rewards.map((name) => ({ name, label: name, judge: false })),
  ...(summary.judge && others.length ? [{ name: "judge", label: summary.judge.function, judge: true }] : []),
];
const color = (model) => `var(--series-${(models.indexOf(model) % 8) + 1})`;
const samples = summary.decoding?.samples ?? 1;
const round = (value, digits) => (value < 0 ? MINUS : "") + Math.abs(value).toFixed(digits);
const percent = (value) => `${(100 * value).toFixed(1)}\u202f%`;
const interval = (found, format) => `${format(found.low)} to ${format(found.high)}`;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** A text with escapes for the controls that change the direction of the text after them. */
const visible = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, (control) => `\\u${control.charCodeAt(0).toString(16)}`);

function modelLabel(name) {
  const dot = el("span", { class: "dot" });
  dot.style.color = color(name);
  return el("span", { class: "model-label" }, dot, el("span", { class: "model-name" }, name));
}

/** A table with a heading row; cells are elements or texts, and `numeric` lists the columns with numbers. */
function dataTable(header, body, numeric = []) {
  const kind = (i) => (numeric.includes(i) ? "number" : null);
  return el("div", { class: "table-wrap" }, el("table", {},
    el("thead", {}, el("tr", {}, header.map((text, i) => el("th", { class: kind(i), scope: "col" }, text)))),
    el("tbody", {}, body.map((cells) => el("tr", {}, cells.map((cell, i) => el("td", { class: kind(i) }, cell)))))));
}

/** A number with its interval below it. */
function withInterval(found, format) {
  if (!found) return MISSING;
  return el("span", {}, el("strong", {}, format(found.mean)), el("span", { class: "interval" }, interval(found, format)));
}

// ---- the result in words

function describe() {
  const decoding = summary.decoding;
  const how = decoding.greedy ? "greedy responses" :
    `${samples} sampled ${samples === 1 ? "response" : "responses"} to each prompt, temperature ${decoding.temperature}`;
  const parts = [`${summary.prompts} prompts of ${summary.data}`, how, `at most ${decoding.max_new_tokens} tokens`];
  const sentences = [];
  const largest = (value) => others.reduce((a, b) => (value(b) > value(a) ? b : a));
  const wins = (model, rate) => `the win rate of ${model} against ${first} is ${percent(rate.mean)} ${verdict(rate)}`;
  const counts = ({ won, tied, lost }) => `ties count half: ${percent(won)} won, ${percent(tied)} tied, ${percent(lost)} lost`;
  for (const reward of rewards) {
    const { score, win_rate: winRate, against_first: shares } = summary.rewards[reward];
    const format = scoreFormat(score);
    if (!others.length) {
      sentences.push(`${first} has a mean score of ${format(score[first].mean)} (${reward}).`);
      continue;
    }
    const best = largest((model) => score[model].mean);
    sentences.push(`By ${reward}, ${best} scores ${format(score[best].mean)} and ${first} ` +
      `${format(score[first].mean)}; ${wins(best, winRate[best][first])}; ${counts(shares[best])}.`);
  }
  if (summary.judge && others.length) {
    const best = largest((model) => summary.judge.models[model].win_rate.mean);
    sentences.push(`By the judge, ${wins(best, summary.judge.models[best].win_rate)}.`);
  }
  return [el("p", { class: "eyebrow" }, parts.join("  \u00b7  ")), el("p", { class: "lead" }, sentences.join(" "))];
}

/** The interval of a win rate in words. */
function verdict(rate) {
  const includes = rate.low <= 0.5 && rate.high >= 0.5 ? ", which includes 50\u202f%" : "";
  return `(${interval(rate, percent)}${includes})`;
}

/** Formats scores with as many decimals as the narrowest interval needs, at least 2 and at most 6. */
function scoreFormat(found) {
  const widths = Object.values(found).map(({ low, high }) => high - low).filter((width) => width > 0);
  const decimals = widths.length ? Math.ceil(-Math.log10(Math.min(...widths))) + 1 : 3;
  return (value) => round(value, Math.min(6, Math.max(2, decimals)));
}

// ---- figures

/** Draws estimates with their intervals on one axis, one row per model. */
function intervalPlot(found) {
  const values = Object.values(found).flatMap(({ low, high, mean: value }) => [low, high, value]);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  [low, high] = [low - margin, high + margin];
  const x = (value) => 4 + (292 * (value - low)) / (high - low);
  const draw = (name) => {
    const { mean: middle, low: from, high: to } = found[name];
    const mark = svg("svg", { viewBox: "0 0 300 22", class: "interval-plot", role: "img",
      "aria-label": `${formatNumber(middle)}, interval ${interval(found[name], formatNumber)}` },
    svg("line", { x1: 4, x2: 296, y1: 11, y2: 11, class: "axis" }),
    svg("line", { x1: x(from), x2: x(to), y1: 11, y2: 11, class: "whisker" }),
    svg("circle", { cx: x(middle), cy: 11, r: 5.5, class: "mean" }));
    mark.style.color = color(name);
    return mark;
  };
  return [draw, low, high];
}

/** A bar of won, tied and lost comparisons. */
function outcomeBar({ won, tied, lost }) {
  const bar = el("div", { class: "outcomes", role: "img",
    "aria-label": `won ${percent(won)}, tied ${percent(tied)}, lost ${percent(lost)}`,
    title: `won ${percent(won)}, tied ${percent(tied)}, lost ${percent(lost)}` });
  for (const [kind, share] of [["won", won], ["tied", tied], ["lost", lost]]) {
    if (share <= 0) continue;
    const part = el("span", { class: kind }, share >= 0.14 ? `${Math.round(100 * share)}\u202f%` : "");
    part.style.flexGrow = share;
    bar.append(part);
  }
  return bar;
}

function scoreCard(reward) {
  const { score, win_rate: winRate, against_first: shares } = summary.rewards[reward];
  const [plot, low, high] = intervalPlot(score);
  const format = scoreFormat(score);
  const scale = el("span", { class: "scale" }, el("span", {}, format(low)), el("span", {}, format(high)));
  const header = ["model", "mean score", scale, ...(others.length ? [`win rate against ${first}`, "won, tied, lost"] : [])];
  const body = models.map((name) => [modelLabel(name), withInterval(score[name], format), plot(name),
    ...(others.length ? [withInterval(winRate[name]?.[first], percent), name === first ? MISSING : outcomeBar(shares[name])] : [])]);
  return el("div", { class: "card" }, el("h3", {}, `Reward: ${reward}`), dataTable(header, body, [1, 3]));
}

function judgeCard() {
  const { models: found } = summary.judge;
  const body = others.map((name) => [modelLabel(name), withInterval(found[name].win_rate, percent),
    percent(found[name].disagreement), `${found[name].position_bias > 0 ? "+" : ""}${round(100 * found[name].position_bias, 1)} points`]);
  return el("div", { class: "card" }, el("h3", {}, `Judge: ${summary.judge.function}`),
    dataTable(["model", `win rate against ${first}`, "orders disagree", "bias to the first place"], body, [1, 2, 3]),
    el("p", { class: "small muted" }, "Each pair was compared in both orders, and the two preferences were averaged."));
}

function passCard(reward) {
  const { models: found, correct_above: bound } = summary.pass_at_k[reward];
  const ks = Object.keys(found[first]).map(Number).sort((a, b) => a - b);
  const body = models.map((name) => [modelLabel(name), ...ks.map((k) => withInterval(found[name][k], percent))]);
  return el("div", { class: "card" }, el("h3", {}, `pass@k: ${reward}`),
    ks.length > 1 ? el("div", { class: "table-wrap" }, passChart(found, ks)) : null,
    dataTable(["model", ...ks.map((k) => `pass@${k}`)], body, ks.map((_, i) => i + 1)),
    el("p", { class: "small muted" }, `Share of prompts with a correct response among k; correct is a score above ` +
      `${formatNumber(bound)}. Unbiased estimate from ${samples} responses to each prompt.`));
}

function passChart(found, ks) {
  const [width, height, left, right, top, bottom] = [640, 210, 46, 14, 10, 26];
  const x = (k) => left + ((width - left - right) * Math.log2(k)) / Math.log2(ks.at(-1));
  const y = (share) => top + (height - top - bottom) * (1 - share);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "pass-chart", role: "img",
    "aria-label": "pass@k by k; the table below has the numbers" });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    chart.append(svg("line", { x1: left, x2: width - right, y1: y(share), y2: y(share), class: "axis" }),
      svg("text", { x: left - 8, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}\u202f%`));
  }
  for (const k of ks) chart.append(svg("text", { x: x(k), y: height - 6, "text-anchor": "middle" }, `k=${k}`));
  for (const name of models) {
    const at = (bound) => ks.map((k) => [x(k), y(found[name][k][bound])]);
    const band = [...at("high"), ...at("low").reverse()].map((point) => point.join(",")).join(" ");
    const line = at("mean").map((point) => point.join(",")).join(" ");
    const group = svg("g", {}, svg("polygon", { points: band, class: "band" }), svg("polyline", { points: line }),
      at("mean").map(([cx, cy]) => svg("circle", { cx, cy, r: 3.5 })));
    group.style.color = color(name);
    chart.append(group);
  }
  return chart;
}

function responseCard() {
  const { kl, tokens_per_second: speed } = summary;
  const header = ["model", "tokens", "length", "stopped"];
  if (kl) header.push(`${kl.name} to ${kl.first}`, "per token");
  if (speed) header.push("tokens/s");
  const lengths = lengthPlots();
  const body = models.map((name) => {
    const { tokens_mean: tokens, finished_frac: finished } = summary.responses[name];
    const cells = [modelLabel(name), round(tokens, 1), lengths(name), percent(finished)];
    if (kl) cells.push(withInterval(kl.models[name], (value) => round(value, 3)), kl.models[name] ? round(kl.models[name].per_token, 4) : MISSING);
    if (speed) cells.push(Math.round(speed[name]).toLocaleString("en-US"));
    return cells;
  });
  const notes = [...(kl ? [`${kl.name}: ${kl.estimator}`] : []), ...(summary.remarks ?? [])];
  return el("div", { class: "card" }, dataTable(header, body, [1, 3, 4, 5, 6]),
    notes.map((text) => el("p", { class: "small muted" }, text)));
}

/** Draws histograms of the lengths of each model's responses, on one axis. */
function lengthPlots() {
  const longest = Math.max(1, ...rows.flatMap((row) => models.map((name) => row.responses[name].tokens)));
  const bins = Math.min(24, longest);
  const counts = Object.fromEntries(models.map((name) => [name, Array(bins).fill(0)]));
  for (const row of rows) {
    for (const name of models) counts[name][Math.min(bins - 1, Math.floor(((row.responses[name].tokens - 1) * bins) / longest))] += 1;
  }
  const most = Math.max(...Object.values(counts).flat());
  return (name) => {
    const bars = counts[name].map((count, i) => svg("rect", { x: (120 * i) / bins + 0.5, y: 26 - (24 * count) / most,
      width: 120 / bins - 1, height: (24 * count) / most }));
    const plot = svg("svg", { viewBox: "0 0 120 28", class: "lengths", role: "img",
      "aria-label": `histogram of response lengths from 1 to ${longest} tokens` },
    svg("title", {}, `1 to ${longest} tokens`), bars, svg("line", { x1: 0, x2: 120, y1: 26.5, y2: 26.5, class: "axis" }));
    plot.style.color = color(name);
    return plot;
  };
}

// ---- the responses side by side

const prompts = groupByPrompt();
const view = { search: "", criterion: criteria[0], other: others[0], outcome: "all", order: "data", page: 0 };
const PER_PAGE = 10;
const list = el("div", { class: "prompts" });
const pager = el("div", { class: "toolbar pager no-print" });
const counter = el("span", { class: "small muted", role: "status" });

function groupByPrompt() {
  const found = new Map();
  for (const row of rows) {
    if (!found.has(row.number)) found.set(row.number, { number: row.number, rows: [], chosen: 0 });
    found.get(row.number).rows.push(row);
  }
  return [...found.values()];
}

/** The share of comparisons that `name` wins against the first model on a prompt; a tie counts half.
 *  Equal responses are ties, as in ops/outcomes.py. */
function winShare(prompt, name, criterion) {
  if (criterion.judge) return mean(prompt.rows.map((row) => row.responses[name].judge.preference));
  const found = (model) => prompt.rows.map((row) => [row.responses[model].scores[criterion.name], row.responses[model].response]);
  const pairs = found(name).flatMap(([a, text]) => found(first).map(([b, other]) => (a === b || text === other ? 0.5 : a > b ? 1 : 0)));
  return mean(pairs);
}

function meanScore(prompt, name, criterion) {
  return mean(prompt.rows.map((row) => row.responses[name].scores[criterion.name]));
}

/** The number by which prompts are sorted: the gain over the first model, or the score of a single model. */
function gain(prompt) {
  const { criterion, other } = view;
  if (!other) return meanScore(prompt, first, criterion);
  if (criterion.judge) return winShare(prompt, other, criterion);
  return meanScore(prompt, other, criterion) - meanScore(prompt, first, criterion);
}

function matches(prompt) {
  const text = view.search.toLowerCase();
  if (text && !prompt.rows.some((row) => [row.prompt, ...models.map((name) => row.responses[name].response)]
    .some((one) => one.toLowerCase().includes(text)))) return false;
  if (view.outcome === "all") return true;
  if (view.outcome === "cut") return prompt.rows.some((row) => models.some((name) => !row.responses[name].finished));
  const share = winShare(prompt, view.other, view.criterion);
  return { won: share > 0.5, tied: share === 0.5, lost: share < 0.5 }[view.outcome];
}

function draw() {
  const found = prompts.filter(matches);
  if (view.order === "gain") found.sort((a, b) => gain(b) - gain(a));
  if (view.order === "loss") found.sort((a, b) => gain(a) - gain(b));
  const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
  view.page = Math.min(view.page, pages - 1);
  const start = view.page * PER_PAGE;
  list.replaceChildren(...found.slice(start, start + PER_PAGE).map(promptCard));
  if (!found.length) list.append(el("p", { class: "empty" }, "No prompt matches."));
  const responses = rows.length < rowsTotal ? `; this page has the first ${prompts.length} of ${summary.prompts}, evaluation.jsonl has all` : "";
  counter.textContent = `${found.length.toLocaleString("en-US")} of ${prompts.length.toLocaleString("en-US")} prompts${responses}`;
  const turn = (text, to) => el("button", { disabled: to < 0 || to >= pages, on: { click: () => { view.page = to; draw(); list.scrollIntoView({ block: "start" }); } } }, text);
  pager.replaceChildren(...(pages > 1 ? [turn("Previous", view.page - 1), el("span", { class: "small muted" }, `${view.page + 1} of ${pages}`), turn("Next", view.page + 1)] : []));
}

function promptCard(prompt) {
  const card = el("article", { class: "card prompt" });
  const fill = () => {
    const row = prompt.rows[prompt.chosen];
    card.replaceChildren(promptHead(prompt, row));
    if (prompt.rows.length > 1) card.append(sampleButtons(prompt, fill));
    card.append(el("div", { class: "side-by-side" }, models.map((name) => responseColumn(row.responses[name], name))));
  };
  fill();
  return card;
}

function promptHead(prompt, row) {
  const badges = [];
  if (view.other && view.criterion) {
    for (const name of others) {
      const share = winShare(prompt, name, view.criterion);
      const [text, kind] = share > 0.5 ? ["wins", "good"] : share < 0.5 ? ["loses", "warn"] : ["ties", ""];
      badges.push(el("span", { class: `badge ${kind}`, title: `${percent(share)} by ${view.criterion.label}` }, `${name} ${text}`));
    }
  }
  const columns = Object.entries(row.columns ?? {}).map(([name, value]) =>
    el("span", { class: "column" }, el("span", { class: "faint" }, `${name} `), visible(typeof value === "string" ? value : JSON.stringify(value))));
  return el("div", { class: "prompt-head" },
    el("div", { class: "toolbar" }, el("span", { class: "faint small number" }, `#${prompt.number + 1}`), badges),
    el("div", { class: "text asked" }, visible(row.asked)),
    row.prompt === row.asked ? null : el("details", { class: "small" }, el("summary", {}, "The prompt as the model reads it"), el("pre", { class: "text mono" }, visible(row.prompt))),
    columns.length ? el("div", { class: "columns small" }, columns) : null);
}

/** Buttons that choose one of several responses, and the mean scores of all of them. */
function sampleButtons(prompt, redraw) {
  return el("div", { class: "toolbar small", role: "group", "aria-label": "Response" }, el("span", { class: "faint" }, "Response"),
    prompt.rows.map((_, i) => el("button", { class: "chip", "aria-pressed": String(i === prompt.chosen),
      on: { click: () => { prompt.chosen = i; redraw(); } } }, String(i + 1))),
    view.criterion && !view.criterion.judge ? el("span", { class: "muted number" }, "mean ",
      models.map((name) => `${name} ${formatNumber(meanScore(prompt, name, view.criterion), 3)}`).join(", ")) : null);
}

function responseColumn(response, name) {
  const facts = Object.entries(response.scores).map(([reward, value]) =>
    el("span", { class: "badge accent number", title: reward }, rewards.length > 1 ? `${reward} ${formatNumber(value, 3)}` : `score ${formatNumber(value, 3)}`));
  facts.push(el("span", { class: "badge number" }, `${response.tokens} ${response.tokens === 1 ? "token" : "tokens"}`));
  if (!response.finished) facts.push(el("span", { class: "badge warn", title: "The response reached the limit of tokens" }, "cut"));
  if (response.log_ratio !== undefined) {
    facts.push(el("span", { class: "badge number", title: `log p(${name}) - log p(${first}) of this response, in nats` }, `log ratio ${round(response.log_ratio, 2)}`));
  }
  if (response.judge) facts.push(el("span", { class: "badge number", title: `preference over ${first}; 1: always` }, `judge ${formatNumber(response.judge.preference)}`));
  const text = response.response ? el("div", { class: "text answer" }, visible(response.response)) : el("div", { class: "faint answer" }, "(empty)");
  const column = el("div", { class: "response" }, el("div", { class: "response-head" }, modelLabel(name), el("div", { class: "facts" }, facts)), text);
  column.style.setProperty("--model-color", color(name));
  return column;
}

/** Buttons of which one is pressed. */
function segmented(label, options, chosen, choose) {
  const buttons = options.map(([value, text]) => el("button", { "aria-pressed": String(value === chosen), on: { click: () => {
    for (const [i, button] of buttons.entries()) button.setAttribute("aria-pressed", String(options[i][0] === value));
    choose(value);
  } } }, text));
  return el("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
}

function selection(label, options, choose) {
  return el("label", { class: "control" }, label, el("select", { on: { change: (event) => choose(event.target.value) } },
    options.map(([value, text]) => el("option", { value }, text))));
}

function controls() {
  const update = (changes) => { Object.assign(view, changes, { page: 0 }); draw(); };
  const search = el("input", { type: "search", placeholder: "Search prompts and responses", "aria-label": "Search prompts and responses",
    on: { input: debounced((event) => update({ search: event.target.value })) } });
  const parts = [search];
  if (others.length && criteria.length) {
    parts.push(segmented("Outcome", [["all", "All"], ["won", "Wins"], ["tied", "Ties"], ["lost", "Losses"]], "all", (outcome) => update({ outcome })));
  } else {
    parts.push(segmented("Responses", [["all", "All"], ["cut", "Cut at the limit"]], "all", (outcome) => update({ outcome })));
  }
  if (others.length > 1) parts.push(selection("of", others.map((name) => [name, name]), (other) => update({ other })));
  if (criteria.length > 1) {
    parts.push(selection("by", criteria.map(({ name, label }) => [name, label]),
      (name) => update({ criterion: criteria.find((one) => one.name === name) })));
  }
  if (criteria.length) {
    const orders = others.length ? [["data", "as in the data"], ["gain", "largest gain first"], ["loss", "largest loss first"]] :
      [["data", "as in the data"], ["gain", "highest score first"], ["loss", "lowest score first"]];
    parts.push(selection("sorted", orders, (order) => update({ order })));
  }
  return el("div", { class: "toolbar no-print" }, parts, el("span", { class: "spring" }), counter);
}

document.getElementById("comparison").replaceChildren(
  ...describe(),
  criteria.length ? el("section", {}, el("h2", {}, "Scores"),
    el("p", { class: "muted" }, "Ranges are 95\u202f% bootstrap intervals over prompts." +
      (others.length ? " A win rate counts a tie as half a win." : "")),
    el("div", { class: "stack" }, rewards.map(scoreCard), criteria.some(({ judge }) => judge) ? judgeCard() : null,
      Object.keys(summary.pass_at_k ?? {}).map(passCard))) : "",
  el("section", {}, el("h2", {}, summary.kl ? `Length, ${summary.kl.name} and speed` : "Length and speed"), el("div", { class: "stack" }, responseCard())),
  el("section", {}, el("h2", {}, others.length ? "Side by side" : "Responses"), el("div", { class: "stack" }, controls(), list, pager)));
draw();
