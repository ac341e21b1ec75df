// The page of an evaluation: figures of each model, and the responses to each prompt side by side.

const PER_PAGE = 10;
const { summary, models, rows, rows_total: rowsTotal } = pageData();
const [first, ...others] = models;
const rewards = Object.keys(summary.rewards ?? {});
// A criterion ranks responses: a reward, or the judge, which only compares with the first model.
const criteria = rewards.map((name) => ({ name, label: name, judge: false }));
if (summary.judge && others.length) criteria.push({ name: "judge", label: summary.judge.function, judge: true });
const samples = summary.decoding?.samples ?? 1;
const colour = (model) => seriesColour(models.indexOf(model));
const round = (value, digits) => (value < 0 ? MINUS : "") + (Math.abs(value) + 5 * 10 ** -(digits + 4)).toFixed(digits); // as format_number
const percent = (value) => `${round(100 * value, 1)}\u202f%`;
const interval = ({ low, high }, format) => `${format(low)} to ${format(high)}`;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** A text with escapes for the controls that change the direction of the text after them. */
const visible = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, (one) => `\\u${one.charCodeAt(0).toString(16)}`);

const modelLabel = (name) =>
  h("span.model-label", h("span.dot", { style: { color: colour(name) } }), h("span.model-name", name));

function withInterval(found, format) {
  return found ? h("span", h("strong", format(found.mean)), h("span.interval", interval(found, format))) : MISSING;
}

/** Formats scores with as many decimals as the narrowest interval needs, at least 2 and at most 6. */
function scoreFormat(found) {
  const widths = Object.values(found).map(({ low, high }) => high - low).filter((width) => width > 0);
  const decimals = widths.length ? Math.ceil(-Math.log10(Math.min(...widths))) + 1 : 3;
  return (value) => round(value, Math.min(6, Math.max(2, decimals)));
}

/** Returns the prompts and how they were answered in words. */
function describe() {
  const { greedy, temperature, max_new_tokens: limit } = summary.decoding;
  const how = greedy ? "greedy responses"
    : `${samples} sampled ${samples === 1 ? "response" : "responses"} to each prompt, temperature ${temperature}`;
  return h("p.lead", [`${summary.prompts} prompts of ${summary.data}`, how, `at most ${limit} tokens`].join("  \u00b7  "));
}

/** Returns a function that draws the estimate of a model with its interval; all share one axis. */
function intervalPlot(found, format) {
  const values = Object.values(found).flatMap(({ low, high, mean: value }) => [low, high, value]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const at = (value) => (high > low ? (100 * (value - low)) / (high - low) : 50);
  return (name) => {
    const { mean: middle, low: from, high: to } = found[name];
    const whisker = { left: `${at(from)}%`, right: `${100 - at(to)}%` };
    const label = { role: "img", "aria-label": `${format(middle)}, interval ${interval(found[name], format)}`, title: interval({ low, high }, format) };
    return h("div.interval-plot", { ...label, style: { color: colour(name) } },
      h("span.whisker", { style: whisker }), h("span.mean", { style: { left: `${at(middle)}%` } }));
  };
}

function outcomeBar(shares) {
  const title = ["won", "tied", "lost"].map((kind) => `${kind} ${percent(shares[kind])}`).join(", ");
  return h("div.outcomes", { role: "img", "aria-label": title, title }, ["won", "tied", "lost"].map((kind) => shares[kind] > 0 &&
    h(`span.${kind}`, { style: { flexGrow: shares[kind] } }, shares[kind] >= 0.14 && `${Math.round(100 * shares[kind])}\u202f%`)));
}

const card = (title, ...content) => h("div.card", title && h("h3", title), ...content);

function scoreCard(reward) {
  const { score, win_rate: winRate, against_first: shares } = summary.rewards[reward];
  const format = scoreFormat(score);
  const plot = intervalPlot(score, format);
  const compared = others.length ? [`win rate against ${first}#`, "won, tied, lost"] : [];
  return card(`Reward: ${reward}`, table(["model", "mean score#", "", ...compared], models.map((name) => [
    modelLabel(name), withInterval(score[name], format), plot(name),
    ...(others.length ? [withInterval(winRate[name]?.[first], percent), name === first ? MISSING : outcomeBar(shares[name])] : []),
  ])));
}

function byCard(reward) {
  const values = Object.entries(summary.by.values);
  const format = scoreFormat(values.map(([, { score }]) => score[reward][first]));
  return card(`${reward} by ${summary.by.column}`, table([summary.by.column, "prompts#", ...models.map((name) => `${name}#`)],
    values.map(([value, { prompts: count, score }]) =>
      [visible(value), count, ...models.map((name) => withInterval(score[reward][name], format))])));
}

function judgeCard() {
  const points = (value) => `${value > 0 ? "+" : ""}${round(100 * value, 1)} points`;
  const lines = others.map((name) => {
    const { win_rate: winRate, disagreement, position_bias: bias } = summary.judge.models[name];
    return [modelLabel(name), withInterval(winRate, percent), percent(disagreement), points(bias)];
  });
  return card(`Judge: ${summary.judge.function}`,
    table(["model", `win rate against ${first}#`, "orders disagree#", "bias to the first place#"], lines),
    h("p.small.muted", "Each pair was compared in both orders, and the two preferences were averaged."));
}

function passCard(reward) {
  const { models: found, correct_above: bound } = summary.pass_at_k[reward];
  const ks = Object.keys(found[first]).map(Number).sort((a, b) => a - b);
  const series = models.map((name, i) => ({
    label: name, colour: colour(name), run: i, steps: ks, values: ks.map((k) => found[name][k].mean),
    spread: ks.map((k) => [found[name][k].low, found[name][k].high]),
  }));
  const chart = ks.length > 1 && lineChart({ label: "pass@k by k; the table below has the numbers", series, marks: [],
    healthy: null, percent: true, x: { name: "k =", ticks: ks } });
  return card(`pass@k: ${reward}`, chart && h("div.pass-chart", chart.element),
    table(["model", ...ks.map((k) => `pass@${k}#`)],
      models.map((name) => [modelLabel(name), ...ks.map((k) => withInterval(found[name][k], percent))])),
    h("p.small.muted", `Share of prompts with a correct response among k; correct is a score above ${formatNumber(bound)}. ` +
      `Unbiased estimate from ${samples} responses to each prompt.`));
}

function responseCard() {
  const { kl, tokens_per_second: speed } = summary;
  const lines = models.map((name) => {
    const { tokens_mean: tokens, finished_frac: finished } = summary.responses[name];
    const found = kl?.models[name];
    return [modelLabel(name), round(tokens, 1), percent(finished),
      ...(kl ? [withInterval(found, (value) => round(value, 3)), found ? round(found.per_token, 4) : MISSING] : []),
      ...(speed ? [Math.round(speed[name]).toLocaleString("en-US")] : [])];
  });
  const header = ["model", "tokens#", "stopped#", ...(kl ? [`${kl.name} to ${kl.first}#`, "per token#"] : []),
    ...(speed ? ["tokens/s#"] : [])];
  const notes = [...(kl ? [`${kl.name}: ${kl.estimator}`] : []), ...(summary.remarks ?? [])];
  return card("", table(header, lines), notes.map((text) => h("p.small.muted", text)));
}

const prompts = [...Map.groupBy(rows, (row) => row.number)].map(([number, group]) => ({ number, rows: group, chosen: 0 }));
const choice = { search: "", criterion: criteria[0], other: others[0], outcome: "all", order: "data", page: 0 };
const list = h("div.prompts");
const pager = h("div.toolbar.pager.no-print");
const counter = h("span.small.muted", { role: "status" });

/** The share of comparisons that `name` wins on a prompt; a tie counts half, and equal responses are ties. */
function winShare(prompt, name) {
  if (choice.criterion.judge) return mean(prompt.rows.map((row) => row.responses[name].judge.preference));
  const found = (model) => prompt.rows.map(({ responses }) => [responses[model].scores[choice.criterion.name], responses[model].response]);
  return mean(found(name).flatMap(([a, text]) =>
    found(first).map(([b, other]) => (a === b || text === other ? 0.5 : a > b ? 1 : 0))));
}

const meanScore = (prompt, name) => mean(prompt.rows.map((row) => row.responses[name].scores[choice.criterion.name]));

/** The number by which prompts are sorted: the gain over the first model, or the score of a single model. */
function gain(prompt) {
  const { criterion, other } = choice;
  if (criterion.judge) return winShare(prompt, other);
  return other ? meanScore(prompt, other) - meanScore(prompt, first) : meanScore(prompt, first);
}

function chosen(prompt) {
  const { search, outcome, other } = choice;
  const texts = prompt.rows.flatMap((row) => [row.prompt, ...models.map((name) => row.responses[name].response)]);
  if (!texts.some((text) => text.toLowerCase().includes(search.toLowerCase()))) return false;
  if (outcome === "all") return true;
  if (outcome === "cut") return prompt.rows.some((row) => models.some((name) => !row.responses[name].finished));
  const share = winShare(prompt, other);
  return { won: share > 0.5, tied: share === 0.5, lost: share < 0.5 }[outcome];
}

function update(changes) {
  Object.assign(choice, { page: 0 }, changes);
  const found = prompts.filter(chosen);
  const sign = { gain: -1, loss: 1 }[choice.order];
  if (sign) found.sort((a, b) => sign * (gain(a) - gain(b)));
  const start = choice.page * PER_PAGE;
  list.replaceChildren(...found.slice(start, start + PER_PAGE).map(promptCard));
  if (!found.length) list.append(h("p.empty", "No prompt matches."));
  const missing = `; this page has the first ${prompts.length} of ${summary.prompts}, evaluation.jsonl has all`;
  counter.textContent = `${found.length.toLocaleString("en-US")} of ${prompts.length.toLocaleString("en-US")} prompts` +
    (rows.length < rowsTotal ? missing : "");
  const pages = Math.ceil(found.length / PER_PAGE);
  const turn = (text, page) => h("button", { disabled: page < 0 || page >= pages, on: { click: () => {
    update({ page });
    list.scrollIntoView({ block: "start" });
  } } }, text);
  pager.hidden = pages < 2;
  pager.replaceChildren(turn("Previous", choice.page - 1),
    h("span.small.muted", `${choice.page + 1} of ${pages}`), turn("Next", choice.page + 1));
}

function promptCard(prompt) {
  const element = h("article.card.prompt");
  const fill = () => {
    const row = prompt.rows[prompt.chosen];
    element.replaceChildren(promptHead(prompt, row), prompt.rows.length > 1 ? sampleButtons(prompt, fill) : "",
      h("div.side-by-side", models.map((name) => responseColumn(row.responses[name], name))));
  };
  fill();
  return element;
}

function promptHead(prompt, row) {
  const badges = choice.criterion && others.map((name) => {
    const share = winShare(prompt, name);
    const [text, kind] = share > 0.5 ? ["wins", ".good"] : share < 0.5 ? ["loses", ".warn"] : ["ties", ""];
    return h(`span.badge${kind}`, { title: `${percent(share)} by ${choice.criterion.label}` }, `${name} ${text}`);
  });
  const text = (value) => visible(typeof value === "string" ? value : JSON.stringify(value));
  const columns = Object.entries(row.columns ?? {}).map(([name, value]) => h("span.column", h("span.faint", `${name} `), text(value)));
  return h("div.prompt-head",
    h("div.toolbar", h("span.faint.small.number", `#${prompt.number + 1}`), badges),
    h("div.text.asked", visible(row.asked)),
    row.prompt !== row.asked && h("details.small", h("summary", "The prompt as the model reads it"), h("pre.text.mono", visible(row.prompt))),
    columns.length > 0 && h("div.columns.small", columns));
}

/** Buttons that choose one of several responses, and the mean scores of all of them. */
function sampleButtons(prompt, fill) {
  const means = models.map((name) => `${name} ${formatNumber(!choice.criterion?.judge && meanScore(prompt, name), 3)}`);
  return h("div.toolbar.small", h("span.faint", "Response"),
    segmented("Response", prompt.rows.map((_, i) => [i, String(i + 1)]), prompt.chosen, (i) => fill((prompt.chosen = i))),
    choice.criterion && !choice.criterion.judge && h("span.muted.number", `mean ${means.join(", ")}`));
}

function responseColumn({ response, scores, tokens, finished, log_ratio: ratio, judge }, name) {
  const badge = (kind, title, text) => h(`span.badge.number.${kind}`, { title }, text);
  const facts = Object.entries(scores).map(([reward, value]) =>
    badge("accent", reward, `${rewards.length > 1 ? reward : "score"} ${formatNumber(value, 3)}`));
  facts.push(h("span.badge.number", `${tokens} ${tokens === 1 ? "token" : "tokens"}`),
    !finished && badge("warn", "The response reached the limit of tokens", "cut"),
    ratio !== undefined && badge("ratio", `log p(${name}) - log p(${first}) of this response, in nats`, `log ratio ${round(ratio, 2)}`),
    judge && badge("judge", `preference over ${first}; 1: always`, `judge ${formatNumber(judge.preference)}`));
  return h("div.response", { style: { borderTopColor: colour(name) } },
    h("div.response-head", modelLabel(name), h("div.facts", facts)),
    response ? h("div.text.answer", visible(response)) : h("div.faint.answer", "(empty)"));
}

function controls() {
  const ranked = others.length && criteria.length;
  const outcomes = ranked ? [["all", "All"], ["won", "Wins"], ["tied", "Ties"], ["lost", "Losses"]]
    : [["all", "All"], ["cut", "Cut at the limit"]];
  const [most, least] = others.length ? ["largest gain first", "largest loss first"] : ["highest score first", "lowest score first"];
  const labelled = (label, options, change) => h("label.control", label, select(label, options, options[0][0], change));
  const criterion = (name) => update({ criterion: criteria.find((one) => one.name === name) });
  return h("div.toolbar.no-print",
    field("search", "Search prompts and responses", (search) => update({ search })),
    segmented(ranked ? "Outcome" : "Responses", outcomes, "all", (outcome) => update({ outcome })),
    others.length > 1 && labelled("of", others.map((name) => [name, name]), (other) => update({ other })),
    criteria.length > 1 && labelled("by", criteria.map(({ name, label }) => [name, label]), criterion),
    criteria.length > 0 && labelled("sorted", [["data", "as in the data"], ["gain", most], ["loss", least]], (order) => update({ order })),
    h("span.spring"), counter);
}

const scoreNote = `Ranges are 95\u202f% bootstrap intervals over prompts.${others.length ? " A win rate counts a tie as half a win." : ""}`;
document.getElementById("comparison").replaceChildren(
  describe(),
  criteria.length ? h("section", h("h2", "Scores"), h("p.muted", scoreNote),
    h("div.stack", rewards.map(scoreCard), criteria.some(({ judge }) => judge) && judgeCard(),
      summary.by && rewards.map(byCard), Object.keys(summary.pass_at_k ?? {}).map(passCard))) : "",
  h("section", h("h2", summary.kl ? `Length, ${summary.kl.name} and speed` : "Length and speed"), h("div.stack", responseCard())),
  h("section", h("h2", others.length ? "Side by side" : "Responses"), h("div.stack", controls(), list, pager)));
update({});
