"""Opens the report in a headless Chromium and uses it as a reader does, with mouse and keyboard.

Each test ends with the check that the console has no error and that nothing was requested from a network.
"""

import base64
import io
import json

import matplotlib.image
import pytest

from ppo_ds.tracking.formatting import format_number
from ppo_ds.tracking.html.page import asset
from ppo_ds.tracking.html.report import write_report
from tests.support.browser import Browser, find_chromium
from tests.tracking.html.runs import NASTY, lines, make_ppo_run, sample


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(find_chromium(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of one run of PPO with token columns and events."""
    folder = tmp_path_factory.mktemp("report")
    write_report([make_ppo_run(folder / "run")], folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def open_page(browser):
    """Opens a report in the browser; checks at the end that all went well."""
    browser.errors.clear()
    browser.requests.clear()

    def open_page(path, width=1280):
        browser.resize(width, 900)
        browser.open(path)
        browser.wait_for("document.querySelector('section')")
        return browser

    yield open_page
    browser.run("localStorage.clear()")
    assert browser.run("document.title") != "owned"
    assert browser.count("script") == 3
    assert browser.count("img") == 0
    assert browser.errors == [] and browser.requests == []


@pytest.fixture
def page(open_page, report):
    return open_page(report)


@pytest.fixture
def show(open_page, tmp_path):
    """Writes and opens the report of the given runs."""

    def show(*run_dirs, running=False, width=1280):
        write_report(run_dirs, tmp_path / "report.html", running=running)
        return open_page(tmp_path / "report.html", width)

    return show


def column(page, name):
    """Returns the texts of a column of the answers."""
    return page.texts(f"tr.answer td.{name}")


def plot_of(page, card, expression):
    """Returns the value of an expression of ``chart``, that of the card with this title, and its ``plot``."""
    chart = f"document.querySelector('.chart[data-title={json.dumps(card)}] .plot').chart"
    page.wait_for(f"{chart}.plot")
    text = page.run(
        f"(chart => {{ const plot = chart.plot; return JSON.stringify({expression}); }})({chart})"
    )
    return json.loads(text)


def point_at(page, card, step):
    """Moves the mouse to a step of a chart."""
    x = plot_of(
        page, card, f"(plot.over.offsetLeft + plot.valToPos({step}, 'x')) / chart.element.clientWidth"
    )
    return page.move_to(f'.chart[data-title="{card}"] .plot', x=x)


def smooth_with(page, presses):
    """Moves the slider of the smoothing, in steps of 0.02."""
    page.run("document.querySelector('#smoothing').focus()")
    for _ in range(presses):
        page.press("ArrowRight")


def test_the_head_says_what_happened(page):
    assert page.text("h1") == "demo"
    assert page.text(".run-facts .badge") == "Finished"
    assert page.text(".lead") == "The run finished all 20 steps in 4 min 12 s."
    assert page.texts(".figure .value")[0].replace("\u202f", " ") == "80.0 %+60.0 points"
    links = page.texts(".page-nav a")
    assert links == [
        "Alarms", "Curves", "Reward over √KL", "Responses", "All metrics", "Settings",
    ]  # fmt: skip
    page.click(".page-nav a:last-child")
    page.wait_for("location.hash === '#settings'")
    table = page.text("#alarms")
    assert NASTY.replace("\u2028", " ").split("<")[0] in table
    assert "<script>" in table
    assert "raise algo.kl.coef" in table
    assert page.texts(".figure .label")[1:3] == [
        "KL in nats, last step", "tokens per response, last step",
    ]  # fmt: skip
    # the list of starts, resumes and ends has no times, which a resume sets back
    page.click("#alarms summary")
    assert page.texts("#alarms th") == ["Step", "Time", "Event", "", "Step", "Event", ""]


def test_numbers_are_rounded_as_on_the_terminal(page):
    shares = [*((2 * i + 1) / 2000 for i in range(100, 1000)), 0.47749999165534973]  # 10.05 %, 10.15 %, ...
    texts = f"{shares}.map((share) => [formatPercent(share), formatNumber(share, 3)])"
    shown = json.loads(page.run(f"(() => {{ {asset('dom.js')}; return JSON.stringify({texts}); }})()"))
    for share, (percent, number) in zip(shares, shown, strict=True):
        assert float(percent[:-2]) == float(format_number(share, ".1%")[:-1])
        assert float(number) == float(format_number(share, ".3f"))


def test_curves_show_values_marks_and_the_healthy_range(page):
    kl = '.chart[data-title="KL to the reference"]'
    steps, values, target = plot_of(page, "KL to the reference", "plot.data")
    assert steps == list(range(1, 21)) and target == [6.0] * 20
    assert values == pytest.approx([12 * (step / 20) ** 2 for step in steps], rel=1e-5)
    spread = plot_of(page, "Reward", "plot.data.slice(1, 3).map(ends => ends[9])")
    assert spread == pytest.approx([0.7, 0.3])  # 0.5 +- 0.2, within the scores of the run
    assert page.text(f"{kl} .latest") == "12"
    groups = '.chart[data-title="Prompts without a difference in score"]'
    assert page.text(f"{groups} .state").startswith("Outside the healthy range: 0")
    assert "sampling.temperature" in page.text(f"{groups} .remedy")
    assert plot_of(page, "KL to the reference", "chart.drawn.marks.map(mark => mark.step)") == [8, 12, 15]

    point_at(page, "KL to the reference", 15)
    tip = page.text(f"{kl} .tip")
    assert tip.startswith("Step 15") and "6.75" in tip and "KL" in tip and "alarm: KL 6.75" in tip
    # the cursor of the other charts stands at the same step, without a tip
    assert plot_of(page, "Reward", "[plot.cursor.idx, chart.tip.hidden]") == [14, True]
    page.run(f"document.querySelector('{kl} .plot').focus()")
    page.press("ArrowRight")
    assert page.text(f"{kl} .tip").startswith("Step 16")
    page.click("#marks")
    assert plot_of(page, "KL to the reference", "chart.drawn.marks") == []


def test_a_stretch_of_steps_is_enlarged_in_all_charts(page):
    """Dragging over steps enlarges them, also after a change of the view; a double click shows all again."""
    range_of = "[plot.scales.x.min, plot.scales.x.max]"
    start = point_at(page, "Reward", 5)
    page.send("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **start)
    end = point_at(page, "Reward", 10)
    page.send("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **end)
    page.send("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **end)
    for card in ("Reward", "KL to the reference"):
        assert plot_of(page, card, range_of) == pytest.approx([5, 10], abs=0.2)
    page.click("#log-axis")
    assert plot_of(page, "Reward", range_of) == pytest.approx([5, 10], abs=0.2)
    middle = page.move_to('.chart[data-title="Reward"] .plot')
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            page.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=clicks, **middle)
    for card in ("Reward", "KL to the reference"):
        assert plot_of(page, card, range_of) == [1, 20]


def cursor_labels(page, card, steps):
    """Returns the labels of the values at the first steps of a chart; moves the cursor with the keyboard."""
    plot_of(page, card, "1")
    chart = f'.chart[data-title="{card}"]'
    page.run(f"document.querySelector('{chart} .plot').focus()")
    labels = {}
    while len(labels) < steps:
        page.press("ArrowRight")
        step = page.text(f"{chart} .tip-head").split()[1]
        labels[int(step)] = page.texts(f"{chart} .tip-line span:not(.dot)")
    return labels


def test_the_cursor_shows_no_value_of_another_step_as_its_own(show, tmp_path):
    runs = [make_ppo_run(tmp_path / name, name=name, steps=steps) for name, steps in (("a", 20), ("b", 12))]
    labels = cursor_labels(show(*runs), "Reward", 14)
    assert labels[12] == ["a", "b"] and labels[14] == ["a", "b (step 12)"]  # b has ended

    records = [{"step": i, "sft/loss": 3.0 / i} for i in range(1, 6)]
    for i in (2, 4):
        records[i - 1]["eval/loss"] = 2.0
    lines(tmp_path / "sft" / "metrics.jsonl", records)
    (tmp_path / "sft" / "config.yaml").write_text("stage: sft\n")
    labels = cursor_labels(show(tmp_path / "sft"), "Loss", 5)
    held_out = [[label for label in labels[step] if "held out" in label] for step in range(1, 6)]
    assert held_out == [[], ["held out"], ["held out (step 2)"], ["held out"], ["held out (step 4)"]]


def test_smoothing_and_log_axis(page):
    smooth_with(page, 30)
    assert page.text(".chart-controls output") == "0.6"
    raw, smooth = plot_of(page, "KL to the reference", "plot.data.slice(1, 3)")
    # the last value by hand: the average with weights 0.6^k, without the bias of the start
    weights = [0.6 ** (19 - i) for i in range(20)]
    mean = sum(w * v for w, v in zip(weights, raw, strict=True)) / sum(weights)
    assert smooth[-1] == pytest.approx(mean) and smooth[0] == pytest.approx(raw[0])
    page.run("document.querySelector('#smoothing').focus()")
    page.press("Home")
    page.click("#log-axis")
    assert page.run("document.querySelector('#log-axis').getAttribute('aria-pressed')") == "true"
    heights = plot_of(page, "KL to the reference", "plot.data[1].map(value => plot.valToPos(value, 'y'))")
    # log(step^2): from step 1 to 2 it rises as much as from 10 to 20
    assert heights[0] - heights[1] == pytest.approx(heights[9] - heights[19], abs=0.1)
    assert plot_of(page, "Policy loss", "plot.scales.y.distr") == 1  # all negative: stays linear


def test_all_metrics_are_explained_and_searched(page):
    page.click('[data-prefix="policy"] > summary')
    page.wait_for("document.querySelector('[data-prefix=policy] .chart')")
    names = page.run("[...document.querySelectorAll('#metrics details > summary h3')].map(e => e.innerText)")
    assert {"Reward", "Policy", "Other metrics"} <= set(names)
    page.click('[data-prefix="policy"] .chart[data-names~="policy/clipfrac"] .about summary')
    note = page.text('[data-prefix="policy"] .chart[data-names~="policy/clipfrac"] .about')
    assert "policy/clipfrac" in note and "Healthy range" in note

    page.type("#metric-search", "made_up")
    page.wait_for("document.querySelectorAll('#metrics .metric-section:not([hidden])').length === 1")
    page.wait_for("document.querySelector('[data-prefix=other] .chart')")
    assert page.text('[data-prefix="other"] h3') == "Other metrics"
    page.type("#metric-search", "nothing has this name")
    page.wait_for("document.querySelectorAll('#metrics .metric-section:not([hidden])').length === 0")
    assert "No metric matches." in page.text("#metrics")
    page.type("#metric-search", "")
    page.wait_for("document.querySelectorAll('#metrics .metric-section:not([hidden])').length > 5")


def test_reward_over_kl(page):
    page.move_to("#frontier .plot")
    drawn = "document.querySelector('#frontier .plot').chart.drawn"
    points = page.run(f"{drawn}.sorted.map(({{ x, y, age }}) => [x, y, age])")
    xs, ys, ages = zip(*points, strict=True)
    assert list(ages) == pytest.approx([i / 19 for i in range(20)])  # later steps are darker
    assert xs == pytest.approx([12**0.5 * step / 20 for step in range(1, 21)], rel=1e-4)
    assert ys == pytest.approx([0.1 + 0.04 * step for step in range(1, 21)])
    page.move_to("#frontier .plot", x=0.5)
    tip = page.text("#frontier .tip").split()
    assert tip == ["Step", "10", "mean", "score", "0.5", "√KL", "1.732"]


def test_answers_are_sorted_filtered_and_searched(page):
    assert column(page, "step") == ["20"] * 4 and page.text(".step-label") == "20"
    assert column(page, "expected") == ["5"] * 4
    assert page.text(".rollout-foot p") == "4 of 4 answers in this file; step 20 had 8."
    assert column(page, "prompt")[2].replace("\n", "").startswith("<script>")  # as text
    page.click("th.score button")
    assert column(page, "score") == ["0.77", "0.52", "0.27", "0.02"]
    page.click("th.score button")
    assert column(page, "score") == ["0.02", "0.27", "0.52", "0.77"]
    assert page.run("document.querySelector('th.score').getAttribute('aria-sort')") == "ascending"
    page.click("th.kl button")
    assert column(page, "kl") == ["3", "2", "1", "0"]

    page.click('[data-finish="length"]')
    assert column(page, "finish") == ["length", "length"]
    page.click('[data-finish="length"]')
    page.type('.rollouts input[type="search"]', "COLOUR name")
    page.wait_for("document.querySelectorAll('tr.answer').length === 1")
    assert column(page, "prompt") == ["Name a colour."]
    page.type('.rollouts input[type="search"]', "")
    page.wait_for("document.querySelectorAll('tr.answer').length === 4")

    page.run("document.querySelector('.step-slider').focus()")
    page.press("ArrowLeft")
    assert column(page, "step") == ["15"] * 4
    page.click('[data-action="all-steps"]')
    assert sorted(set(column(page, "step"))) == ["10", "15", "20", "5"] and page.count("tr.answer") == 16
    page.click('.rollouts .segmented [data-value="eval"]')
    assert column(page, "step") == ["0"]
    assert page.text(".rollout-foot p") == "1 of 1 answer in this file."


def test_tokens_are_coloured(page):
    # the answer with token columns is open
    assert page.text("tr.detail .tokens").replace("↵", "") == "Step 20 answer 0\nend"
    assert page.texts(".colourings button") == ["None", "Log-prob", "KL", "Value", "Advantage", "Reward"]

    def colours(name):
        page.click(f'.colourings [data-value="{name}"]')
        return page.run("[...document.querySelectorAll('.token')].map(t => t.style.backgroundColor)")

    advantage = colours("advantage")  # -1 to 1 in steps of 0.4
    assert all("--low" in colour for colour in advantage[:3]) and all("--high" in c for c in advantage[3:])
    assert advantage[0] == advantage[5].replace("--high", "--low")
    reward = colours("reward")
    assert "62%" in reward[5] and all(" 0%" in colour for colour in reward[:5])
    logprob = colours("logprob")
    assert [("0%" in colour, "--low" in colour) for colour in logprob[:1]] == [(True, True)]
    assert "62%" in logprob[5]
    assert "--high" in colours("kl")[0] and "--low" in colours("kl")[5]  # -0.1 i against -0.3
    assert len(set(colours("value"))) > 3
    assert page.count("tr.answer .tint") == 4 * 6  # the answers of the list are coloured too
    assert colours("") == [""] * 6

    page.move_to('.token[data-index="2"]')
    facts = page.text(".token-info")
    for fact in (
        "id 2",
        "token 3 of 6",
        "log-prob −0.2",
        "reference −0.3",
        "KL 0.1",
        "value 0.1",
        "advantage −0.2",
    ):
        assert fact in facts, facts
    assert page.texts("tr.detail dt") == ["length", "style", "answer"]


def test_an_answer_is_opened_and_closed_and_followed(page):
    page.click("tr.answer.open")
    assert page.count("tr.detail") == 0
    page.run("document.querySelectorAll('tr.answer')[1].focus()")
    page.press("Enter")
    assert page.text("tr.detail .prompt-text") == "Name a colour."
    page.click('[data-action="follow"]')
    assert page.text(".followed .prompt-text") == "Name a colour."
    assert column(page, "step") == ["5", "10", "15", "20"]
    page.wait_for("document.querySelector('.followed .plot').chart.plot")
    followed = page.run("document.querySelector('.followed .plot').chart.plot.data")
    assert followed == [[5, 10, 15, 20], pytest.approx([0.255, 0.26, 0.265, 0.27])]
    page.click('[data-action="unfollow"]')
    assert page.count("tr.answer") == 4 and page.run("document.querySelector('.followed').hidden")


def test_light_and_dark(page):
    def background():
        return page.run("getComputedStyle(document.body).backgroundColor")

    def reload_until(condition):
        """Chromium writes localStorage in the background, perhaps after the page is loaded again."""
        for _ in range(20):
            page.reload()
            if page.run(condition):
                return
        raise AssertionError(condition)

    light = background()
    line = "plot.series[3].stroke(plot)"
    assert plot_of(page, "Reward", line) == "color(srgb 0.0431373 0.419608 0.721569)"
    page.click("[data-theme-switch]")
    assert plot_of(page, "Reward", line) == "color(srgb 0.4 0.701961 0.941176)"
    assert page.run("document.documentElement.dataset.theme") == "dark" and background() != light
    reload_until("document.documentElement.dataset.theme === 'dark'")  # the choice is kept
    page.click("[data-theme-switch]")
    assert background() == light
    page.run("localStorage.clear()")
    page.resize(1280, 900, dark=True)  # the colour scheme of the system
    reload_until(f"getComputedStyle(document.body).backgroundColor !== '{light}'")


def test_settings_are_searched(page):
    page.type("#settings-search", "optim.lr")
    page.wait_for("[...document.querySelectorAll('.setting-group')].filter(g => !g.hidden).length === 1")
    assert page.text("tr[data-key='actor.optim.lr']").split() == ["actor.optim.lr", "0.000001"]
    assert not page.run("document.querySelector(\"tr[data-key='actor.model.path']\").offsetParent")


def test_a_narrow_window(show, tmp_path):
    run_dir = make_ppo_run(tmp_path / "run")
    page = show(run_dir, width=400)
    assert page.run("document.documentElement.scrollWidth") <= 400
    page.click("tr.answer:nth-of-type(1)")
    page.run("document.querySelectorAll('.rollouts select')[0].value = 'score'")
    page.run("document.querySelectorAll('.rollouts select')[0].dispatchEvent(new Event('change'))")
    assert [text.split()[-1] for text in column(page, "score")] == ["0.77", "0.52", "0.27", "0.02"]
    page.move_to("tr.answer td.prompt")
    cell = "getComputedStyle(document.querySelector('tr.answer:hover td')).backgroundColor"
    assert page.run(cell) == "rgba(0, 0, 0, 0)"  # the row is coloured as a whole, without gaps


def test_several_runs_are_overlaid(show, tmp_path):
    runs = [
        make_ppo_run(tmp_path / "a", name="first"),
        make_ppo_run(tmp_path / "b", name="second", lr=1e-5, steps=12),
    ]
    page = show(*runs, make_ppo_run(tmp_path / "c", name="second", events=False, summary=False))
    assert page.text("h1") == "3 runs"
    names = page.texts(".runs-table .run-name")
    assert names[0] == "first"
    assert names[1] != names[2]
    assert all(name.startswith("second (") for name in names[1:])
    assert page.texts(".runs-table .badge") == ["Finished", "Finished", "No end recorded"]
    colours = "plot.series.slice(1).map(series => series.stroke(plot))"
    assert len(set(plot_of(page, "Reward", colours))) == 3
    page.click('.chart-controls [data-run="1"]')
    assert len(plot_of(page, "Reward", colours)) == 2
    differences = page.texts(".differences tr[data-key] td:first-child")
    assert sorted(differences) == ["actor.optim.lr", "run.dir", "run.name"]
    page.click(".setting-group summary")
    assert page.texts(".setting-group[open] th") == ["Key", *names]
    page.run("document.querySelector('.rollouts select').value = '1'")
    page.run("document.querySelector('.rollouts select').dispatchEvent(new Event('change'))")
    assert column(page, "step") == ["10"] * 4


@pytest.mark.parametrize("stage", ["sft", "reward_model"])
def test_other_stages(show, tmp_path, stage):
    prefix, metric = {"sft": ("sft", "eval/token_accuracy"), "reward_model": ("rm", "eval/accuracy")}[stage]
    records = [
        {"step": i, f"{prefix}/loss": 3.0 / i, metric: 0.5 + 0.1 * i, "time/step": 0.1} for i in range(1, 5)
    ]
    lines(tmp_path / "run" / "metrics.jsonl", records)
    (tmp_path / "run" / "config.yaml").write_text(f"stage: {stage}\nrun: {{steps: 4}}\n")
    texts = {"prompt": "0: text", "asked": "text", "response": "preferred 1, rejected 0"}
    row = texts | {"score": 1.0, "subset": "b"}
    lines(tmp_path / "run" / "samples" / "eval_step_000004.jsonl", [row])
    page = show(tmp_path / "run")
    assert (
        page.text(".run-facts .muted")
        == {"sft": "Supervised fine-tuning", "reward_model": "Reward model"}[stage]
    )
    assert page.count("#curves .chart") >= 1 and page.count("#frontier") == 0
    assert page.text("#responses h2") == {"sft": "Responses", "reward_model": "Pairs"}[stage]
    assert page.count("tr.answer") == 1
    page.click("tr.answer")
    assert "subset" in page.text("tr.detail")


def test_a_huge_answer_and_a_run_with_nothing_but_events(show, tmp_path):
    run_dir = make_ppo_run(tmp_path / "run", tokens=False)
    rows = [sample(20, row, tokens=False) | {"response": "<b>" * 33_000 + NASTY} for row in range(4)] * 30
    lines(run_dir / "samples" / "step_000020.jsonl", rows)
    page = show(run_dir)
    assert page.count("b") < 20 and page.count(".colourings") == 0
    assert "more characters)" in page.run("document.querySelector('tr.answer td.response').textContent")
    lines(
        tmp_path / "bare" / "events.jsonl", [{"step": 0, "time": 0.0, "kind": "started", "text": "started"}]
    )
    page = show(tmp_path / "bare", running=True)
    assert page.text(".run-facts .badge") == "In progress" and "reload it" in page.text("footer")
    assert page.count("#curves") == 0


def test_charts_are_drawn(page):
    """A chart has pixels of its curve and of its healthy range: it is drawn, not only built."""
    page.move_to('.chart[data-title="Prompts without a difference in score"] .plot')
    picture = matplotlib.image.imread(io.BytesIO(base64.b64decode(page.screenshot())))[..., :3]

    def pixels(red, green, blue):
        return int((abs(picture - [red / 255, green / 255, blue / 255]).max(-1) < 0.03).sum())

    assert pixels(0x0B, 0x6B, 0xB8) > 150 and pixels(0xE8, 0xF6, 0xF1) > 1500


def test_metrics_may_have_the_names_of_properties_of_every_object(show, tmp_path):
    """Only the first run has them; in the second, JavaScript would find a function under the name."""
    first, second = (make_ppo_run(tmp_path / name, name=name) for name in ("__proto__", "constructor"))
    records = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    named = dict.fromkeys(("constructor", "toString", "__proto__", "hasOwnProperty"), 1.0)
    (first / "metrics.jsonl").write_text("".join(json.dumps(record | named) + "\n" for record in records))
    assert show(first, second).count("section") > 3
