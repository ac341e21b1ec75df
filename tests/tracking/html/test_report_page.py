"""Opens the report in a headless Chromium and uses it as a reader does, with mouse and keyboard.

Each test ends with the check that the console has no error and that nothing was requested from a network.
"""

import base64
import io
import json
import re

import matplotlib.image
import pytest

from ppo_ds.tracking.html.page import asset
from ppo_ds.tracking.html.report import write_report
from tests.support.browser import Browser, find_chromium
from tests.tracking.html.runs import NASTY, lines, make_ppo_run, sample


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(find_chromium(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the report of the given runs in a browser; checks at the end that all went well."""
    browser.errors.clear()
    browser.requests.clear()

    def open_report(*run_dirs, running=False, width=1280):
        browser.resize(width, 900)
        write_report(run_dirs, tmp_path / "report.html", running=running)
        browser.open(tmp_path / "report.html")
        browser.wait_for("document.querySelector('section')")
        return browser

    yield open_report
    browser.run("localStorage.clear()")
    assert (
        browser.run("document.title") != "owned"
        and browser.count("script") == 3
        and browser.count("img") == 0
    )
    assert browser.errors == [] and browser.requests == []


@pytest.fixture
def page(show, tmp_path):
    """The report of one run of PPO with token columns and events."""
    return show(make_ppo_run(tmp_path / "run"))


def column(page, name):
    """Returns the texts of a column of the answers."""
    return page.texts(f"tr.answer td.{name}")


def path_of(page, card, index=0):
    """Returns the path of a curve of the card with this title; draws it if it is not on the screen."""
    chart = f'.chart[data-title="{card}"]'
    page.move_to(f"{chart} svg")
    page.wait_for(f"document.querySelector('{chart} path.line')")
    lines = f"document.querySelectorAll('{chart} path.line:not(.raw)')"
    return page.run(f"{lines}[{index}].getAttribute('d')")


def points(path):
    """Returns the coordinates of a path of straight lines."""
    return [tuple(map(float, point.split(" "))) for point in path.replace("L", "M").split("M")[1:]]


def test_the_head_says_what_happened(page):
    assert page.text("h1") == "demo"
    assert page.text(".run-facts .badge") == "Finished"
    assert "rose from 20.0 % to 80.0 %" in page.text(".lead")
    assert page.texts(".figure .value")[0].replace("\u202f", " ") == "80 %+60 points"
    links = page.texts(".page-nav a")
    assert links == [
        "Alarms", "Curves", "Reward over √KL", "Responses", "All metrics", "Time and memory", "Settings",
    ]  # fmt: skip
    page.click(".page-nav a:last-child")
    page.wait_for("location.hash === '#settings'")
    table = page.text("#alarms")
    assert (
        NASTY.replace("\u2028", " ").split("<")[0] in table
        and "<script>" in table
        and "raise algo.kl.coef" in table
    )


def test_curves_show_values_marks_and_the_healthy_range(page):
    kl = '.chart[data-title="KL to the reference"]'
    ends = points(path_of(page, "KL to the reference"))
    assert len(ends) == 20
    # y grows downwards; the curve is 12 (step / 20)^2, so its middle is at a quarter of its height
    low, middle, high = (ends[i][1] for i in (0, 9, 19))
    assert (middle - low) / (high - low) == pytest.approx((0.25 - 1 / 400) / (1 - 1 / 400), abs=0.01)
    assert page.text(f"{kl} .latest") == "12"
    assert page.count(f"{kl} rect.healthy") == 1
    assert page.text(f"{kl} .state") == "Outside the healthy range of KL per response: at most 10"
    assert "algo.kl.coef" in page.text(f"{kl} .remedy")
    marks = page.run(f"[...document.querySelectorAll('{kl} .mark')].map(mark => mark.dataset.step)")
    assert marks == ["8", "12", "15"]

    path_of(page, "Reward")
    plot = page.run(
        f"(b => [b.width, b.height])(document.querySelector('{kl} .plot').getBoundingClientRect())"
    )
    page.move_to(f"{kl} .plot", x=ends[14][0] / plot[0], y=0.5)
    tip = page.text(f"{kl} .tip")
    assert tip.startswith("Step 15") and "6.75" in tip and "KL" in tip and "alarm: KL 6.75" in tip
    # the cursor of the other charts stands at the same step, without a tip
    assert page.count('.chart[data-title="Reward"] .cursor line') == 1
    assert not page.run("document.querySelector('.chart[data-title=\"Reward\"] .tip').offsetParent")

    page.run(f"document.querySelector('{kl} .plot').focus()")
    page.press("ArrowRight")
    assert page.text(f"{kl} .tip").startswith("Step 16")

    page.click("#marks")
    assert page.count(f"{kl} .mark") == 0


def cursor_labels(page, card, steps):
    """Returns the labels of the values at the first steps of a chart; moves the cursor with the keyboard."""
    path_of(page, card)
    chart = f'.chart[data-title="{card}"]'
    page.run(f"document.querySelector('{chart} .plot').focus()")
    for _ in range(steps):
        page.press("ArrowLeft")
    labels = {}
    while len(labels) < steps:
        step = page.text(f"{chart} .tip-head").split()[1]
        labels[int(step)] = page.texts(f"{chart} .tip-line span:not(.dot)")
        page.press("ArrowRight")
    return labels


def test_the_cursor_shows_no_value_of_another_step_as_its_own(show, tmp_path):
    runs = [make_ppo_run(tmp_path / name, name=name, steps=steps) for name, steps in (("a", 20), ("b", 12))]
    labels = cursor_labels(show(*runs), "Reward", 14)
    assert labels[12] == ["a", "b"] and labels[13] == labels[14] == ["a"]  # b has ended

    records = [{"step": i, "sft/loss": 3.0 / i} for i in range(1, 8)]
    for i in (2, 4):
        records[i - 1]["eval/loss"] = 2.0
    lines(tmp_path / "sft" / "metrics.jsonl", records)
    (tmp_path / "sft" / "config.yaml").write_text("stage: sft\n")
    labels = cursor_labels(show(tmp_path / "sft"), "Loss", 7)
    held_out = {step: [label for label in found if "held out" in label] for step, found in labels.items()}
    assert held_out == {
        1: [], 2: ["held out"], 3: ["held out (step 2)"], 4: ["held out"], 5: ["held out (step 4)"],
        6: [], 7: [],
    }  # fmt: skip


def test_ticks_of_a_log_axis(page):
    ranges = [[100, 115], [0.09, 0.31], [1, 30], [0.5, 400], [1e-6, 1e6]]
    text = "logTicks(low, high).map((tick) => Number(tick.toPrecision(3)))"
    script = f"{asset('dom.js')} {asset('charts.js')} return {ranges}.map(([low, high]) => {text})"
    ticks = page.run(f"(() => {{ {script} }})()")
    assert ticks == [
        [100, 105, 110, 115],
        [0.1, 0.2, 0.3],
        [1, 2, 5, 10, 20],
        [0.5, 1, 2, 5, 10, 20, 50, 100, 200],
        [1e-6, 1e-3, 1, 1e3, 1e6],
    ]


def test_a_smoothed_curve_with_zeros_stays_on_its_log_axis(show, tmp_path):
    """The mean of a curve with zeros is below its smallest positive value."""
    values = [0.0, 0.0, 0.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    records = [{"step": i + 1, "reward/score_mean": value} for i, value in enumerate(values)]
    lines(tmp_path / "run" / "metrics.jsonl", records)
    page = show(tmp_path / "run")
    page.run("document.querySelector('#smoothing').focus()")
    for _ in range(45):
        page.press("ArrowRight")
    page.click("#log-axis")
    heights = [y for _, y in points(path_of(page, "Reward"))]
    assert len(heights) == 5 and all(12 <= y <= 190 - 24 for y in heights)


def test_smoothing_and_log_axis(page):
    first_reward = points(path_of(page, "Reward"))[0]
    raw = path_of(page, "KL to the reference")
    page.run("document.querySelector('#smoothing').focus()")
    for _ in range(30):
        page.press("ArrowRight")
    assert page.text(".chart-controls output") == "0.6"
    smooth = path_of(page, "KL to the reference")
    assert smooth != raw and page.count('.chart[data-title="KL to the reference"] path.raw') == 2
    # the last value by hand: the average with weights 0.6^k, without the bias of the start
    values = [12 * (step / 20) ** 2 for step in range(1, 21)]
    weights = [0.6 ** (19 - i) for i in range(20)]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    (_, low), (_, high) = points(raw)[0], points(raw)[-1]
    expected = low + (mean - values[0]) / (values[-1] - values[0]) * (high - low)
    assert points(smooth)[-1][1] == pytest.approx(expected, abs=0.15)

    page.run("document.querySelector('#smoothing').focus()")
    assert points(path_of(page, "Reward"))[0] == first_reward  # the start has no bias towards 0
    page.run("document.querySelector('#smoothing').focus()")
    page.press("Home")
    page.click("#log-axis")
    assert page.run("document.querySelector('#log-axis').getAttribute('aria-pressed')") == "true"
    heights = [y for _, y in points(path_of(page, "KL to the reference"))]
    # log(step^2): from step 1 to 2 it rises as much as from 10 to 20
    assert heights[0] - heights[1] == pytest.approx(heights[9] - heights[19], abs=0.3)
    assert points(path_of(page, "Policy loss"))  # all negative: stays linear
    page.click("#log-axis")
    assert path_of(page, "KL to the reference") == raw


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


def test_reward_over_kl_and_stacked_areas(page):
    page.move_to("#frontier svg")
    page.wait_for("document.querySelectorAll('#frontier circle[fill-opacity]').length === 20")
    circles = "[...document.querySelectorAll('#frontier circle[fill-opacity]')]"
    opacities = page.run(f"{circles}.map(c => Number(c.getAttribute('fill-opacity')))")
    assert opacities == sorted(opacities) and opacities[-1] == 1
    xs = page.run(f"{circles}.map(c => Number(c.getAttribute('cx')))")
    assert xs[1] - xs[0] == pytest.approx(xs[19] - xs[18], abs=0.2)  # sqrt(12 (step / 20)^2) is linear

    page.move_to("#time .chart:nth-child(1) svg")
    page.wait_for("document.querySelectorAll('#time .chart:nth-child(1) path.layer').length === 4")
    page.move_to("#time .chart:nth-child(1) svg")  # again, now that it is drawn
    tip = page.text("#time .chart:nth-child(1) .tip")
    assert tip.startswith("Step") and ": 2 s" in tip
    assert page.texts("#time .chart:nth-child(1) .legend-entry") == [
        "generation", "update of the actor", "update of the critic", "other",
    ]  # fmt: skip
    assert page.texts("#time h3") == ["Phases of a step", "Peak memory of the GPU", "Memory of the host"]


def test_answers_are_sorted_filtered_and_searched(page):
    assert column(page, "step") == ["20"] * 4 and page.text(".step-label") == "20"
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
    page.type('input[aria-label="Score at least"]', "0.5")
    page.wait_for("document.querySelectorAll('tr.answer').length === 2")
    page.type('input[aria-label="Score at least"]', "")
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
    assert [("0%" in colour, "--low" in colour) for colour in logprob[:1]] == [
        (True, True)
    ] and "62%" in logprob[5]
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
    page.wait_for("document.querySelector('.followed path.line')")
    assert len(points(page.run("document.querySelector('.followed path.line').getAttribute('d')"))) == 4
    page.click('[data-action="unfollow"]')
    assert page.count("tr.answer") == 4 and page.run("document.querySelector('.followed').hidden")


def test_light_and_dark(page):
    def background():
        return page.run("getComputedStyle(document.body).backgroundColor")

    light = background()
    page.click("[data-theme-switch]")
    assert page.run("document.documentElement.dataset.theme") == "dark" and background() != light
    page.reload()
    assert page.run("document.documentElement.dataset.theme") == "dark"  # the choice is kept
    page.click("[data-theme-switch]")
    assert background() == light
    page.run("localStorage.clear()")
    page.resize(1280, 900, dark=True)  # the colour scheme of the system
    page.reload()
    assert background() != light


def test_settings_are_searched(page):
    page.type("#settings-search", "optim.lr")
    page.wait_for("[...document.querySelectorAll('.setting-group')].filter(g => !g.hidden).length === 1")
    assert page.text("tr[data-key='actor.optim.lr']").split() == ["actor.optim.lr", "0.000001"]
    assert not page.run("document.querySelector(\"tr[data-key='actor.model.path']\").offsetParent")


def test_a_narrow_window_and_a_printed_page(show, tmp_path):
    run_dir = make_ppo_run(tmp_path / "run")
    with (run_dir / "config.yaml").open("a") as file:
        file.write("extra:\n" + "".join(f"  key_{i}: {i}\n" for i in range(500)))
    page = show(run_dir, width=400)
    assert page.run("document.documentElement.scrollWidth") <= 400
    page.click("tr.answer:nth-of-type(1)")
    page.run("document.querySelectorAll('.rollouts select')[0].value = 'score'")
    page.run("document.querySelectorAll('.rollouts select')[0].dispatchEvent(new Event('change'))")
    assert [text.split()[-1] for text in column(page, "score")] == ["0.77", "0.52", "0.27", "0.02"]
    page.move_to("tr.answer td.prompt")
    cell = "getComputedStyle(document.querySelector('tr.answer:hover td')).backgroundColor"
    assert page.run(cell) == "rgba(0, 0, 0, 0)"  # the row is coloured as a whole, without gaps
    page.resize(1280, 900)
    pdf = base64.b64decode(page.send("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    # 500 settings need many more pages if they are not in columns
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 9
    assert page.run("getComputedStyle(document.querySelector('#time .grid')).display") == "grid"


def test_several_runs_are_overlaid(show, tmp_path):
    runs = [
        make_ppo_run(tmp_path / "a", name="first"),
        make_ppo_run(tmp_path / "b", name="second", lr=1e-5, steps=12),
    ]
    page = show(*runs, make_ppo_run(tmp_path / "c", name="second", events=False, summary=False))
    assert page.text("h1") == "3 runs"
    names = page.texts(".runs-table .run-name")
    assert (
        names[0] == "first"
        and names[1] != names[2]
        and all(name.startswith("second (") for name in names[1:])
    )
    assert page.texts(".runs-table .badge") == ["Finished", "Finished", "No end recorded"]
    reward = '.chart[data-title="Reward"]'
    path_of(page, "Reward")
    assert page.count(f"{reward} path.line") == 3
    colours = page.run(
        f"[...document.querySelectorAll('{reward} path.line')].map(p => p.getAttribute('stroke'))"
    )
    assert len(set(colours)) == 3
    page.click('.chart-controls [data-run="1"]')
    path_of(page, "Reward")
    assert page.count(f"{reward} path.line") == 2
    differences = page.texts(".differences tr[data-key] td:first-child")
    assert sorted(differences) == ["actor.optim.lr", "run.dir", "run.name"]
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
    row = {
        "prompt": "0: text",
        "asked": "text",
        "response": "preferred 1, rejected 0",
        "score": 1.0,
        "subset": "b",
    }
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
    assert "does not record" in page.text("#alarms") or "did not record" in page.text("#alarms")


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


def test_screenshots_are_drawn(page):
    """Charts have pixels of their colours: the page is drawn, not only built."""
    page.move_to('.chart[data-title="Reward"] svg')
    picture = matplotlib.image.imread(io.BytesIO(base64.b64decode(page.screenshot())))[..., :3]
    blue = (abs(picture - [0x0B / 255, 0x6B / 255, 0xB8 / 255]).max(-1) < 0.03).sum()
    assert blue > 150, json.dumps([int(blue), picture.shape])
