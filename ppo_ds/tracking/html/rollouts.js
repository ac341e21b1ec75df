// The rollout viewer: answers by step, sorted, filtered and searched, with coloured tokens.

const PAGE = 50; // answers shown at once
const TINTED = 150; // most coloured tokens of an answer in the list, which shows two lines of it
const KNOWN_KEYS = new Set([
  "split",
  "step",
  "prompt",
  "prompt_id",
  "response",
  "score",
  "kl",
  "length",
  "finish",
  "tokens",
  "components",
  "turns",
]);
const COLUMNS = [
  { key: "step", label: "Step" },
  { key: "score", label: "Score" },
  { key: "kl", label: "KL" },
  { key: "length", label: "Tokens" },
  { key: "finish", label: "End" },
  { key: "prompt", label: "Prompt" },
  { key: "response", label: "Response" },
];

// What a token can be coloured by. `diverging`: negative and positive values have different colours.
const COLOURINGS = [
  {
    key: "logprob",
    label: "Log-prob",
    diverging: false,
    needs: ["logprobs"],
    values: (tokens) => tokens.logprobs,
    ends: ["expected", "surprising"],
  },
  {
    key: "kl",
    label: "KL",
    diverging: true,
    needs: ["logprobs", "ref_logprobs"],
    values: (tokens) => tokens.logprobs.map((value, i) => difference(value, tokens.ref_logprobs[i])),
    ends: ["less likely than under the reference", "more likely"],
  },
  {
    key: "value",
    label: "Value",
    diverging: true,
    needs: ["values"],
    values: (tokens) => tokens.values,
    ends: ["negative", "positive"],
  },
  {
    key: "advantage",
    label: "Advantage",
    diverging: true,
    needs: ["advantages"],
    values: (tokens) => tokens.advantages,
    ends: ["worse than expected", "better than expected"],
  },
  {
    key: "reward",
    label: "Reward",
    diverging: true,
    needs: ["rewards"],
    values: (tokens) => tokens.rewards,
    ends: ["negative", "positive"],
  },
];

function difference(a, b) {
  return Number.isFinite(a) && Number.isFinite(b) ? a - b : null;
}

/** The viewer of the samples of all runs, as one element. */
class Rollouts {
  constructor(runs) {
    this.runs = runs;
    this.state = {
      run: runs.findIndex((run) => run.samples.rows.length > 0),
      split: null,
      step: null,
      allSteps: false,
      query: "",
      finish: new Set(),
      low: null,
      high: null,
      sort: null,
      descending: true,
      colour: null,
      follow: null,
      limit: PAGE,
    };
    this.opened = null;
    this.controls = el("div", { class: "rollout-controls" });
    this.followed = el("div", { class: "followed card", hidden: true });
    this.status = el("p", { class: "faint small", role: "status" });
    this.body = el("tbody");
    this.head = el("thead");
    this.more = el("button", {
      class: "more",
      on: { click: () => this.update({ limit: this.state.limit + PAGE }) },
    });
    this.legend = el("div", { class: "scale small muted" });
    this.element = el(
      "div",
      { class: "rollouts" },
      this.controls,
      this.followed,
      el("div", { class: "card answers" }, el("table", {}, this.head, this.body)),
      el("div", { class: "toolbar rollout-foot" }, this.status, el("span", { class: "spring" }), this.more),
    );
    this.selectRun(this.state.run);
  }

  get run() {
    return this.runs[this.state.run];
  }

  get rows() {
    return this.run.samples.rows.filter((row) => row.split === this.state.split);
  }

  promptOf(row) {
    return this.run.samples.prompts[row.prompt];
  }

  selectRun(index) {
    const rows = this.runs[index].samples.rows;
    const splits = [...new Set(rows.map((row) => row.split))];
    // training rows have a KL and token columns, so they come first
    const split = splits.includes("train") ? "train" : splits[0];
    this.state.run = index;
    this.selectSplit(split);
  }

  selectSplit(split) {
    const rows = this.run.samples.rows.filter((row) => row.split === split);
    this.steps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b);
    this.keys = COLUMNS.filter(({ key }) => rows.some((row) => row[key] !== undefined && row[key] !== null));
    this.colourings = COLOURINGS.filter(({ needs }) =>
      rows.some((row) => needs.every((column) => row.tokens?.[column])),
    );
    this.finishes = [...new Set(rows.map((row) => row.finish).filter(Boolean))].sort();
    const colour = this.colourings.find(({ key }) => key === "advantage") ?? this.colourings[0];
    Object.assign(this.state, {
      split,
      step: this.steps.at(-1),
      allSteps: false,
      finish: new Set(),
      follow: null,
      limit: PAGE,
      sort: null,
      colour: colour?.key ?? null,
    });
    this.opened = null;
    this.drawControls();
    this.draw();
  }

  update(changes) {
    Object.assign(this.state, { limit: PAGE }, changes);
    this.draw();
  }

  // -- controls ---------------------------------------------------------------------------------------------

  drawControls() {
    const { state, run } = this;
    const recorded = new Set(run.samples.rows.map((row) => row.split));
    const splits = [...recorded].sort((a, b) => (b === "train") - (a === "train") || a.localeCompare(b));
    const names = { train: "Training", eval: "Held out", train_prompts: "Training prompts" };
    const runSelect =
      this.runs.length > 1 &&
      el(
        "select",
        { "aria-label": "Run", on: { change: (event) => this.selectRun(Number(event.target.value)) } },
        this.runs.map(
          (each, i) =>
            each.samples.rows.length > 0 && el("option", { value: i, selected: i === state.run }, each.name),
        ),
      );
    const search = el("input", {
      type: "search",
      placeholder: "Search prompts and answers",
      "aria-label": "Search prompts and answers",
      value: state.query,
      on: { input: debounced((event) => this.update({ query: event.target.value })) },
    });
    const bound = (key, label) =>
      el("input", {
        type: "number",
        step: "any",
        placeholder: label,
        "aria-label": `Score ${label}`,
        class: "score-bound",
        on: {
          input: debounced((event) =>
            this.update({ [key]: event.target.value === "" ? null : Number(event.target.value) }),
          ),
        },
      });
    const finish =
      this.finishes.length > 1 &&
      this.finishes.map((reason) =>
        el(
          "button",
          {
            class: "chip",
            "aria-pressed": "false",
            dataset: { finish: reason },
            on: { click: (event) => this.toggleFinish(reason, event.currentTarget) },
          },
          reason,
        ),
      );
    this.stepSlider = el("input", {
      type: "range",
      min: 0,
      max: Math.max(this.steps.length - 1, 0),
      value: this.steps.length - 1,
      class: "step-slider",
      "aria-label": "Step",
      on: {
        input: (event) =>
          this.update({ step: this.steps[event.target.value], allSteps: false, follow: null }),
      },
    });
    this.stepLabel = el("b", { class: "number step-label" });
    this.allSteps = el(
      "button",
      {
        class: "chip",
        "aria-pressed": "false",
        dataset: { action: "all-steps" },
        on: { click: () => this.update({ allSteps: !state.allSteps, follow: null }) },
      },
      "All steps",
    );
    const sortSelect = el(
      "select",
      {
        class: "narrow-only",
        "aria-label": "Sort by",
        on: { change: (event) => this.sortBy(event.target.value) },
      },
      el("option", { value: "" }, "Sort by\u2026"),
      this.keys.map(({ key, label }) => el("option", { value: key }, label)),
    );
    this.controls.replaceChildren(
      el(
        "div",
        { class: "toolbar" },
        runSelect,
        splits.length > 1 &&
          segmented(
            splits.map((split) => [split, names[split] ?? split]),
            state.split,
            (split) => this.selectSplit(split),
          ),
        this.steps.length > 1 && el("label", { class: "control" }, "Step", this.stepSlider, this.stepLabel),
        this.steps.length > 1 && this.allSteps,
      ),
      el(
        "div",
        { class: "toolbar" },
        search,
        finish,
        this.keys.some(({ key }) => key === "score") &&
          el(
            "span",
            { class: "score-range muted small" },
            "Score",
            bound("low", "at least"),
            bound("high", "at most"),
          ),
        sortSelect,
      ),
    );
    if (this.colourings.length) {
      const options = [["", "None"], ...this.colourings.map(({ key, label }) => [key, label])];
      this.controls.append(
        el(
          "div",
          { class: "toolbar colourings" },
          el("span", { class: "muted small" }, "Colour tokens by"),
          segmented(options, state.colour ?? "", (key) =>
            this.update({ colour: key || null, limit: state.limit }),
          ),
          this.legend,
        ),
      );
    }
  }

  toggleFinish(reason, button) {
    const { finish } = this.state;
    if (!finish.delete(reason)) finish.add(reason);
    button.setAttribute("aria-pressed", finish.has(reason));
    this.update({});
  }

  sortBy(key) {
    if (!key) return this.update({ sort: null });
    const { sort, descending } = this.state;
    return this.update({
      sort: key,
      descending: sort === key ? !descending : key !== "step" && key !== "prompt",
    });
  }

  // -- the answers ------------------------------------------------------------------------------------------

  /** Returns the rows that pass all filters, in the chosen order. */
  selected() {
    const { step, allSteps, query, finish, low, high, sort, descending, follow } = this.state;
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = this.rows.filter((row) => {
      if (follow !== null ? row.prompt_id !== follow : !allSteps && row.step !== step) return false;
      if (finish.size && !finish.has(row.finish)) return false;
      if (low !== null && !(row.score >= low)) return false;
      if (high !== null && !(row.score <= high)) return false;
      const text = `${this.promptOf(row)}\n${row.response}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (!sort) return rows;
    const value = (row) => (sort === "prompt" ? this.promptOf(row) : row[sort]);
    const sign = descending ? -1 : 1;
    const missing = (key) => key === undefined || key === null;
    return rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y); // missing values last in both orders
      return (
        sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)))
      );
    });
  }

  draw() {
    const { state } = this;
    const rows = this.selected();
    const shown = rows.slice(0, state.limit);
    this.scale = this.scaleOf(shown);
    this.drawHead();
    this.drawFollowed(rows);
    this.drawLegend();
    if (!shown.includes(this.opened)) this.opened = shown.find((row) => row.tokens) ?? null;
    this.scoreExtent = extent(this.rows.map((row) => row.score ?? null));
    this.body.replaceChildren(
      ...shown.flatMap((row) => [this.answer(row), row === this.opened && this.detail(row)].filter(Boolean)),
    );
    if (!shown.length) {
      this.body.append(
        el(
          "tr",
          {},
          el("td", { colspan: this.keys.length, class: "empty" }, "No answer matches these filters."),
        ),
      );
    }
    this.stepLabel.textContent =
      state.allSteps || state.follow !== null ? "all" : formatNumber(state.step, 9);
    this.stepSlider.value = this.steps.indexOf(state.step);
    this.allSteps.setAttribute("aria-pressed", state.allSteps);
    const [read, recorded] = this.run.samples.shown[state.split];
    const thinning = read < recorded ? ` Samples of ${read} of ${recorded} steps are in this file.` : "";
    const answers = rows.length === 1 ? "answer" : "answers";
    this.status.textContent = `${shown.length} of ${rows.length} ${answers}.${thinning}`;
    this.more.hidden = rows.length <= shown.length;
    this.more.textContent = `Show ${Math.min(PAGE, rows.length - shown.length)} more`;
  }

  drawHead() {
    const { sort, descending } = this.state;
    this.head.replaceChildren(
      el(
        "tr",
        {},
        this.keys.map(({ key, label }) => {
          const order = sort === key ? (descending ? "descending" : "ascending") : "none";
          return el(
            "th",
            { "aria-sort": order, class: key, scope: "col" },
            el("button", { dataset: { sort: key }, on: { click: () => this.sortBy(key) } }, label),
          );
        }),
      ),
    );
  }

  answer(row) {
    const toggle = () => {
      this.opened = this.opened === row ? null : row;
      this.redrawKeepingChoice(row);
    };
    const keydown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      toggle();
    };
    const open = row === this.opened;
    return el(
      "tr",
      {
        class: `answer${open ? " open" : ""}`,
        tabindex: 0,
        "aria-expanded": open,
        on: { click: toggle, keydown },
      },
      this.keys.map(({ key, label }) =>
        el("td", { class: key, "data-label": label }, ...this.cellContent(key, row)),
      ),
    );
  }

  /** Returns the content of one cell of an answer, as a list. */
  cellContent(key, row) {
    switch (key) {
      case "score":
        return [el("span", { class: "number" }, formatNumber(row.score, 3)), this.scoreBar(row.score)];
      case "finish":
        if (!row.finish) return [MISSING];
        return [el("span", { class: `badge ${row.finish === "length" ? "warn" : ""}` }, row.finish)];
      case "prompt":
        return [el("div", { class: "clamp" }, this.promptOf(row))];
      case "response": {
        const coloured = this.colouring && row.tokens?.text;
        const text = coloured ? this.tokenSpans(row.tokens, "tint", TINTED) : row.response || "(empty)";
        return [el("div", { class: "clamp" }, text)];
      }
      default:
        return [el("span", { class: "number" }, formatNumber(row[key], key === "kl" ? 3 : 9))];
    }
  }

  /** Draws again without opening another answer in place of one that was just closed. */
  redrawKeepingChoice(row) {
    const lines = [...this.body.querySelectorAll("tr.answer")];
    const shown = this.selected().slice(0, this.state.limit);
    const index = shown.indexOf(row);
    this.body.querySelectorAll("tr.detail").forEach((detail) => detail.remove());
    lines.forEach((line, i) => {
      const open = shown[i] === this.opened;
      line.classList.toggle("open", open);
      line.setAttribute("aria-expanded", open);
    });
    if (this.opened) lines[index].after(this.detail(row));
  }

  scoreBar(score) {
    const [low, high] = this.scoreExtent ?? extent(this.rows.map((each) => each.score ?? null));
    const fill = el("span");
    fill.style.width = `${high > low && Number.isFinite(score) ? (100 * (score - low)) / (high - low) : 0}%`;
    return el("span", { class: "bar", "aria-hidden": "true" }, fill);
  }

  detail(row) {
    const facts = Object.entries(row.components ?? {}).map(([name, score]) => [name, formatNumber(score, 4)]);
    for (const [key, value] of Object.entries(row)) {
      if (KNOWN_KEYS.has(key) || value === null) continue;
      facts.push([
        key.replaceAll("_", " "),
        typeof value === "number"
          ? formatNumber(value)
          : typeof value === "string"
            ? value
            : JSON.stringify(value),
      ]);
    }
    const again = this.rows.filter((each) => each.prompt_id === row.prompt_id && row.prompt_id !== undefined);
    const steps = new Set(again.map((each) => each.step)).size;
    const follow =
      steps > 1 &&
      this.state.follow === null &&
      el(
        "button",
        {
          dataset: { action: "follow" },
          on: { click: () => this.follow(row) },
        },
        `Follow this prompt across ${steps} steps`,
      );
    return el(
      "tr",
      { class: "detail" },
      el(
        "td",
        { colspan: this.keys.length },
        el(
          "div",
          { class: "detail-grid" },
          el(
            "div",
            {},
            el("h4", {}, "Prompt"),
            el("div", { class: "text prompt-text" }, this.promptOf(row)),
            follow,
          ),
          el(
            "div",
            {},
            el("h4", {}, "Response"),
            this.responseText(row),
            facts.length > 0 &&
              el(
                "dl",
                { class: "facts" },
                facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { class: "text" }, value)]),
              ),
          ),
        ),
      ),
    );
  }

  // -- tokens -----------------------------------------------------------------------------------------------

  get colouring() {
    return this.colourings.find(({ key }) => key === this.state.colour);
  }

  /** Returns the size of a value that gets the full colour: the 98th percentile of the shown answers. */
  scaleOf(rows) {
    const colouring = this.colouring;
    if (!colouring) return 1;
    const sizes = rows
      .filter((row) => colouring.needs.every((column) => row.tokens?.[column]))
      .flatMap((row) => colouring.values(row.tokens))
      .filter(Number.isFinite)
      .map(Math.abs)
      .sort((a, b) => a - b);
    return sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 1;
  }

  drawLegend() {
    const colouring = this.colouring;
    this.legend.hidden = !colouring;
    if (!colouring) return;
    const [low, high] = colouring.ends;
    const bar = el("span", { class: colouring.diverging ? "scale-bar diverging" : "scale-bar" });
    const limits = colouring.diverging ? [-this.scale, this.scale] : [0, -this.scale];
    this.legend.replaceChildren(
      el("span", {}, `${formatNumber(limits[0], 2)} ${low}`),
      bar,
      el("span", {}, `${formatNumber(limits[1], 2)} ${high}`),
    );
  }

  /** Returns the first `limit` tokens as elements with the colours of their values. */
  tokenSpans(tokens, className, limit = Infinity) {
    const colouring = this.colouring;
    const values = colouring?.needs.every((column) => tokens[column]) ? colouring.values(tokens) : [];
    return tokens.text.slice(0, limit).map((text, i) => {
      const shown = text.replaceAll("\n", "\u21b5\n");
      const names = tokens.feedback?.[i] ? `${className} feedback` : className;
      const token = el("span", { class: names, dataset: { index: i } }, shown);
      if (Number.isFinite(values[i])) token.style.backgroundColor = this.tokenColour(values[i]);
      return token;
    });
  }

  responseText(row) {
    const { tokens, turns, response } = row;
    if (!tokens?.text) {
      const spans = turns?.map(({ by, text }) => el("span", { class: by === "environment" && "feedback" }, text));
      return el("div", { class: "text response-text" }, spans || response || "(empty)");
    }
    const joined = tokens.text.join("");
    const rest = response.startsWith(joined) ? response.slice(joined.length) : ""; // beyond sample_tokens
    const hint = "Point at a token to see its numbers.";
    const info = el("div", { class: "token-info small muted", "aria-live": "polite" }, hint);
    const show = (event) => {
      const token = event.target.closest?.(".token");
      if (token) info.replaceChildren(...tokenFacts(tokens, Number(token.dataset.index)));
    };
    const text = el(
      "div",
      { class: "text tokens response-text", on: { pointerover: show, click: show } },
      this.tokenSpans(tokens, "token"),
      rest && el("span", { class: "faint" }, rest),
    );
    return el("div", {}, text, info);
  }

  tokenColour(value) {
    const { diverging } = this.colouring;
    const share = Math.min(Math.abs(value) / this.scale, 1) * 62;
    const colour = diverging && value > 0 ? "--high" : "--low";
    return `color-mix(in oklab, var(${colour}) ${share.toFixed(0)}%, transparent)`;
  }

  // -- one prompt across steps ------------------------------------------------------------------------------

  follow(row) {
    this.opened = null;
    this.update({ follow: row.prompt_id, sort: "step", descending: false });
    this.element.scrollIntoView({ block: "start" });
  }

  drawFollowed(rows) {
    const { follow, split } = this.state;
    this.followed.hidden = follow === null;
    forgetCharts(this.followed.querySelectorAll(".plot"));
    if (follow === null) return;
    const all = this.rows.filter((row) => row.prompt_id === follow && Number.isFinite(row.score));
    const scores = new Map();
    for (const row of all) scores.set(row.step, [...(scores.get(row.step) ?? []), row.score]);
    const steps = [...scores.keys()].sort((a, b) => a - b);
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const series = [
      {
        label: "score",
        colour: seriesColour(0),
        run: null,
        steps,
        values: steps.map((step) => mean(scores.get(step))),
        dash: null,
        spread: null,
      },
    ];
    const chart =
      steps.length > 1 &&
      new LineChart({ label: "Score of this prompt over steps", series, marks: [], healthy: null });
    this.followed.replaceChildren(
      el(
        "div",
        { class: "toolbar" },
        el("h3", {}, "One prompt across steps"),
        el("span", { class: "spring" }),
        el(
          "button",
          { dataset: { action: "unfollow" }, on: { click: () => this.update({ follow: null, sort: null }) } },
          "Back to all answers",
        ),
      ),
      el("div", { class: "text prompt-text" }, rows.length ? this.promptOf(rows[0]) : ""),
      ...(chart
        ? [
            el(
              "p",
              { class: "faint small" },
              `Score by step (${{ train: "training", eval: "held out" }[split] ?? "training prompts"})`,
            ),
            chart.element,
          ]
        : []),
    );
  }
}

/** Returns the numbers of one token as elements. */
function tokenFacts(tokens, i) {
  const facts = [
    ["log-prob", tokens.logprobs?.[i]],
    ["reference", tokens.ref_logprobs?.[i]],
  ];
  if (tokens.logprobs && tokens.ref_logprobs)
    facts.push(["KL", difference(tokens.logprobs[i], tokens.ref_logprobs[i])]);
  facts.push(
    ["value", tokens.values?.[i]],
    ["advantage", tokens.advantages?.[i]],
    ["reward", tokens.rewards?.[i]],
  );
  const id = tokens.ids ? ` (id ${tokens.ids[i]})` : "";
  return [
    el("b", { class: "mono" }, JSON.stringify(tokens.text[i])),
    `${id} token ${i + 1} of ${tokens.text.length}`,
    ...facts
      .filter(([, value]) => value !== undefined && value !== null)
      .map(([name, value]) => el("span", {}, `${name} `, el("b", { class: "number" }, formatNumber(value)))),
  ];
}

/** Returns buttons of which one is pressed; `options` are [value, label]. */
function segmented(options, chosen, choose) {
  const buttons = options.map(([value, label]) =>
    el(
      "button",
      {
        "aria-pressed": value === chosen,
        dataset: { value },
        on: {
          click: (event) => {
            for (const button of buttons) button.setAttribute("aria-pressed", button === event.currentTarget);
            choose(value);
          },
        },
      },
      label,
    ),
  );
  return el("div", { class: "segmented", role: "group" }, buttons);
}
