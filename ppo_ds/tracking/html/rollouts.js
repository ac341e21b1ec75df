// The rollout viewer: answers by step, sorted, filtered and searched, with coloured tokens.

const PAGE = 50; // answers shown at once
const TINTED = 150; // most coloured tokens of an answer in the list, which shows two lines of it
const COLUMNS = { step: "Step", score: "Score", kl: "KL", length: "Tokens", finish: "End", prompt: "Prompt", expected: "Answer", response: "Response" };
const HIDDEN_KEYS = new Set(["split", "prompt_id", "tokens", "components", "columns", "turns", ...Object.keys(COLUMNS)]);
const SPLITS = { train: "Training", eval: "Held out", train_prompts: "Training prompts" };

// What a token can be coloured by: its label, whether both signs have colours, the values, the legend's ends.
const COLOURINGS = {
  logprob: ["Log-prob", false, (tokens) => tokens.logprobs, ["expected", "surprising"]],
  kl: ["KL", true, klOf, ["less likely than under the reference", "more likely"]],
  value: ["Value", true, (tokens) => tokens.values, ["negative", "positive"]],
  advantage: ["Advantage", true, (tokens) => tokens.advantages, ["worse than expected", "better than expected"]],
  reward: ["Reward", true, (tokens) => tokens.rewards, ["negative", "positive"]],
};

function klOf({ logprobs, ref_logprobs: reference }) {
  const both = (i) => Number.isFinite(logprobs[i]) && Number.isFinite(reference[i]);
  return logprobs && reference && logprobs.map((value, i) => (both(i) ? value - reference[i] : null));
}

/** The viewer of the samples of all runs, as one element. */
class Rollouts {
  constructor(runs) {
    this.runs = runs;
    this.state = { query: "" };
    this.controls = h("div.rollout-controls");
    this.followed = h("div.followed.card", { hidden: true });
    this.status = h("p.faint.small", { role: "status" });
    this.head = h("tr");
    this.body = h("tbody");
    this.more = h("button.more", { on: { click: () => this.update({ limit: this.state.limit + PAGE }) } });
    this.legend = h("div.scale.small.muted");
    this.element = h("div.rollouts", this.controls, this.followed,
      h("div.card.answers", h("table", h("thead", this.head), this.body)),
      h("div.toolbar.rollout-foot", this.status, h("span.spring"), this.more));
    this.selectRun(runs.findIndex((run) => run.samples.rows.length > 0));
  }

  selectRun(index) {
    this.run = this.runs[index];
    this.splits = Object.keys(this.run.samples.shown).filter((split) => this.run.samples.rows.some((row) => row.split === split));
    // training rows have a KL and token columns, so they come first
    this.splits.sort((a, b) => (b === "train") - (a === "train") || a.localeCompare(b));
    this.selectSplit(this.splits[0]);
  }

  selectSplit(split) {
    const rows = this.run.samples.rows.filter((row) => row.split === split);
    this.rows = rows;
    this.steps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b);
    this.keys = Object.keys(COLUMNS).filter((key) => rows.some((row) => row[key] !== undefined && row[key] !== null));
    this.colourings = Object.keys(COLOURINGS).filter((key) => rows.some((row) => row.tokens && COLOURINGS[key][2](row.tokens)));
    this.finishes = [...new Set(rows.map((row) => row.finish).filter(Boolean))].sort();
    const scores = rows.map((row) => row.score).filter(Number.isFinite);
    this.scores = [Math.min(...scores), Math.max(...scores)];
    const colour = this.colourings.includes("advantage") ? "advantage" : this.colourings[0];
    Object.assign(this.state, { split, colour, step: this.steps.at(-1), allSteps: false, follow: null, sort: null, finish: new Set() });
    this.drawControls();
    this.update({});
  }

  update(changes) {
    Object.assign(this.state, { limit: PAGE }, changes);
    const shown = this.selected().slice(0, this.state.limit);
    if (!shown.includes(this.opened)) this.opened = shown.find((row) => row.tokens) ?? null;
    this.draw();
  }

  drawControls() {
    const { state } = this;
    const runs = this.runs.flatMap((run, i) => (run.samples.rows.length ? [[i, run.name]] : []));
    const toggleFinish = (reason) => {
      if (!state.finish.delete(reason)) state.finish.add(reason);
      this.update({});
      return state.finish.has(reason);
    };
    const input = (event) => this.update({ step: this.steps[event.target.value], allSteps: false, follow: null });
    this.slider = h("input.step-slider", { type: "range", min: 0, max: this.steps.length - 1, "aria-label": "Step", on: { input } });
    this.stepLabel = h("b.number.step-label");
    const all = () => {
      this.update({ allSteps: !state.allSteps, follow: null });
      return state.allSteps;
    };
    this.allSteps = chip("All steps", false, all, { dataset: { action: "all-steps" } });
    this.controls.replaceChildren(
      h("div.toolbar",
        runs.length > 1 && select("Run", runs, this.runs.indexOf(this.run), (index) => this.selectRun(Number(index))),
        this.splits.length > 1 && segmented("Prompts", this.splits.map((split) => [split, SPLITS[split] ?? split]),
          state.split, (split) => this.selectSplit(split)),
        this.steps.length > 1 && [h("label.control", "Step", this.slider, this.stepLabel), this.allSteps]),
      h("div.toolbar",
        field("search", "Search prompts and answers", (query) => this.update({ query }), { value: state.query }),
        this.finishes.length > 1 && this.finishes.map((reason) =>
          chip(reason, false, () => toggleFinish(reason), { dataset: { finish: reason } })),
        h("span.narrow-only", select("Sort by", [["", "Sort by\u2026"], ...this.keys.map((key) => [key, COLUMNS[key]])], "",
          (key) => this.sortBy(key)))));
    if (!this.colourings.length) return;
    const options = [["", "None"], ...this.colourings.map((key) => [key, COLOURINGS[key][0]])];
    this.controls.append(h("div.toolbar.colourings", h("span.muted.small", "Colour tokens by"),
      segmented("Colour tokens by", options, state.colour, (colour) => this.update({ colour, limit: state.limit })), this.legend));
  }

  sortBy(key) {
    const { sort, descending } = this.state;
    this.update({ sort: key, descending: sort === key ? !descending : key !== "step" && key !== "prompt" });
  }

  promptOf(row) {
    return this.run.samples.prompts[row.prompt];
  }

  /** Returns the rows that pass all filters, in the chosen order. */
  selected() {
    const { step, allSteps, query, finish, sort, descending, follow } = this.state;
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = this.rows.filter((row) => {
      if (follow !== null ? row.prompt_id !== follow : !allSteps && row.step !== step) return false;
      if (finish.size && !finish.has(row.finish)) return false;
      const text = `${this.promptOf(row)}\n${row.response}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (!sort) return rows;
    const value = (row) => (sort === "prompt" ? this.promptOf(row) : row[sort]);
    const missing = (key) => key === undefined || key === null;
    const compare = (x, y) => (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
    return rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y); // missing values last in both orders
      return (descending ? -1 : 1) * compare(x, y);
    });
  }

  draw() {
    const { state } = this;
    const rows = this.selected();
    const shown = rows.slice(0, state.limit);
    this.drawLegend(shown);
    this.drawFollowed(rows);
    const order = (key) => (state.sort !== key ? "none" : state.descending ? "descending" : "ascending");
    this.head.replaceChildren(...this.keys.map((key) => h(`th.${key}`, { "aria-sort": order(key), scope: "col" },
      h("button", { on: { click: () => this.sortBy(key) } }, COLUMNS[key]))));
    this.body.replaceChildren(...shown.flatMap((row) => (row === this.opened ? [this.answer(row), this.detail(row)] : [this.answer(row)])));
    if (!shown.length) this.body.append(h("tr", h("td.empty", { colspan: this.keys.length }, "No answer matches these filters.")));
    this.stepLabel.textContent = state.allSteps || state.follow !== null ? "all" : formatNumber(state.step, 9);
    this.slider.value = this.steps.indexOf(state.step);
    this.allSteps.setAttribute("aria-pressed", state.allSteps);
    const [read, recorded] = this.run.samples.shown[state.split];
    const thinning = read < recorded ? ` Samples of ${read} of ${recorded} steps are in this file.` : "";
    const made = !state.allSteps && state.follow === null && state.split === "train" && this.run.stepSizes[state.step];
    this.status.textContent = `${shown.length} of ${rows.length} ${rows.length === 1 ? "answer" : "answers"} in this file` +
      `${made ? `; step ${state.step} had ${formatNumber(made, 9)}` : ""}.${thinning}`;
    this.more.hidden = rows.length <= shown.length;
    this.more.textContent = `Show ${Math.min(PAGE, rows.length - shown.length)} more`;
  }

  answer(row) {
    const open = row === this.opened;
    const click = () => {
      this.opened = open ? null : row;
      this.draw();
      this.body.querySelectorAll("tr.answer")[this.selected().indexOf(row)].focus({ preventScroll: true });
    };
    const keydown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      click();
    };
    return h(open ? "tr.answer.open" : "tr.answer", { tabindex: 0, "aria-expanded": open, on: { click, keydown } },
      this.keys.map((key) => h(`td.${key}`, { "data-label": COLUMNS[key] }, this.cell(key, row))));
  }

  cell(key, row) {
    if (key === "prompt" || key === "expected") return h("div.clamp", key === "prompt" ? this.promptOf(row) : row.expected);
    if (key === "response")
      return h("div.clamp", this.state.colour && row.tokens?.text ? this.tokenSpans(row.tokens, "tint", TINTED) : row.response || "(empty)");
    if (key === "finish") return row.finish ? h(`span.badge${row.finish === "length" ? ".warn" : ""}`, row.finish) : MISSING;
    const text = h("span.number", formatNumber(row[key], key === "score" || key === "kl" ? 3 : 9));
    if (key !== "score") return text;
    const [low, high] = this.scores;
    const share = high > low && Number.isFinite(row.score) ? (row.score - low) / (high - low) : 0;
    return [text, h("span.bar", { "aria-hidden": "true" }, h("span", { style: { width: `${100 * share}%` } }))];
  }

  detail(row) {
    const text = (value) => (typeof value === "number" ? formatNumber(value) : typeof value === "string" ? value : JSON.stringify(value));
    const others = Object.entries(row).filter(([key, value]) => !HIDDEN_KEYS.has(key) && value !== null);
    const facts = [...Object.entries(row.components ?? {}), ...Object.entries(row.columns ?? {}), ...others.map(([key, value]) => [key.replaceAll("_", " "), value])];
    const same = this.rows.filter((each) => row.prompt_id !== undefined && each.prompt_id === row.prompt_id);
    const steps = new Set(same.map((each) => each.step)).size;
    const click = () => {
      this.update({ follow: row.prompt_id, sort: "step", descending: false });
      this.element.scrollIntoView({ block: "start" });
    };
    return h("tr.detail", h("td", { colspan: this.keys.length }, h("div.detail-grid",
      h("div", h("h4", "Prompt"), h("div.text.prompt-text", this.promptOf(row)),
        steps > 1 && this.state.follow === null &&
          h("button", { dataset: { action: "follow" }, on: { click } }, `Follow this prompt across ${steps} steps`)),
      h("div", h("h4", "Response"), responseText(this, row),
        facts.length > 0 && h("dl.facts", facts.map(([name, value]) => [h("dt", name), h("dd.text", text(value))]))))));
  }

  /** Draws the scale of the colours, whose end is the 98th percentile of the sizes in the shown answers. */
  drawLegend(rows) {
    this.legend.hidden = !this.state.colour;
    if (!this.state.colour) return;
    const [, diverging, values, [low, high]] = COLOURINGS[this.state.colour];
    const sizes = rows.flatMap((row) => (row.tokens && values(row.tokens)) ?? []).filter(Number.isFinite).map(Math.abs);
    sizes.sort((a, b) => a - b);
    this.scale = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 1;
    const [from, to] = diverging ? [-this.scale, this.scale] : [0, -this.scale];
    this.legend.replaceChildren(`${formatNumber(from, 2)} ${low}`,
      h(diverging ? "span.scale-bar.diverging" : "span.scale-bar"), `${formatNumber(to, 2)} ${high}`);
  }

  /** Returns the first `limit` tokens as elements with the colours of their values. */
  tokenSpans(tokens, className, limit = Infinity) {
    const [, diverging, valuesOf] = COLOURINGS[this.state.colour] ?? [];
    const values = valuesOf?.(tokens) ?? [];
    const colour = (value) => {
      const share = Math.min(Math.abs(value) / this.scale, 1) * 62;
      return `color-mix(in oklab, var(${diverging && value > 0 ? "--high" : "--low"}) ${share.toFixed(0)}%, transparent)`;
    };
    return tokens.text.slice(0, limit).map((text, index) => h(`span.${className}${tokens.feedback?.[index] ? ".feedback" : ""}`,
      { dataset: { index }, style: Number.isFinite(values[index]) ? { backgroundColor: colour(values[index]) } : {} },
      text.replaceAll("\n", "\u21b5\n")));
  }

  /** Draws the prompt that is followed across steps, and its mean score at each. */
  drawFollowed(rows) {
    const { follow, split } = this.state;
    this.followed.hidden = follow === null;
    if (follow === null) return;
    const scored = this.rows.filter((row) => row.prompt_id === follow && Number.isFinite(row.score));
    const steps = [...new Set(scored.map((row) => row.step))].sort((a, b) => a - b);
    const values = steps.map((step) => {
      const scores = scored.filter((row) => row.step === step).map((row) => row.score);
      return scores.reduce((sum, score) => sum + score, 0) / scores.length;
    });
    const series = [{ label: "score", colour: seriesColour(0), steps, values }];
    const click = () => this.update({ follow: null, sort: null });
    this.followed.replaceChildren(
      h("div.toolbar", h("h3", "One prompt across steps"), h("span.spring"),
        h("button", { dataset: { action: "unfollow" }, on: { click } }, "Back to all answers")),
      h("div.text.prompt-text", rows.length ? this.promptOf(rows[0]) : ""),
      ...(steps.length > 1 ? [h("p.faint.small", `Score by step (${(SPLITS[split] ?? split).toLowerCase()})`),
        lineChart({ label: "Score of this prompt over steps", series, marks: [], healthy: null }).element] : []));
  }
}

/** Returns a response, with its tokens as elements whose numbers appear under the pointer. */
function responseText(viewer, { tokens, turns, response }) {
  if (!tokens?.text) {
    const spans = turns?.map(({ by, text }) => h(by === "environment" ? "span.feedback" : "span", text));
    return h("div.text.response-text", spans || response || "(empty)");
  }
  const joined = tokens.text.join("");
  const rest = response.startsWith(joined) ? response.slice(joined.length) : ""; // beyond sample_tokens
  const info = h("div.token-info.small.muted", { "aria-live": "polite" }, "Point at a token to see its numbers.");
  const show = (event) => {
    const token = event.target.closest?.(".token");
    if (token) info.replaceChildren(...tokenFacts(tokens, Number(token.dataset.index)));
  };
  const on = { pointerover: show, click: show };
  return h("div",
    h("div.text.tokens.response-text", { on }, viewer.tokenSpans(tokens, "token"), rest && h("span.faint", rest)), info);
}

/** Returns the numbers of one token as elements. */
function tokenFacts(tokens, i) {
  const columns = { "log-prob": tokens.logprobs, reference: tokens.ref_logprobs, KL: klOf(tokens), value: tokens.values,
    advantage: tokens.advantages, reward: tokens.rewards };
  const facts = Object.entries(columns).filter(([, values]) => values?.[i] !== undefined && values[i] !== null);
  const id = tokens.ids ? `(id ${tokens.ids[i]}) ` : "";
  return [h("b.mono", JSON.stringify(tokens.text[i])), `${id}token ${i + 1} of ${tokens.text.length}`,
    ...facts.map(([name, values]) => h("span", `${name} `, h("b.number", formatNumber(values[i]))))];
}
