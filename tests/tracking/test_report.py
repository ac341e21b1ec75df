"""Tests the image of the curves and the tables of the report."""

import io
import json

import matplotlib.image
import numpy as np
import pytest

from ppo_ds.tracking.curves import _score_table, before_after, plot_curves

BLUE = np.array([0x2F, 0x6F, 0xB0]) / 255


def picture(tmp_path, records):
    source, png = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    return plot_curves(source, png, title="a run"), png


@pytest.mark.parametrize(
    ("metrics", "panels"),
    [
        (["sft/loss", "eval/loss", "sft/token_accuracy", "eval/token_accuracy", "eval/perplexity"], 2),
        (["rm/loss", "rm/accuracy", "rm/margin_mean", "eval/accuracy", "eval/score_mean", "eval/loss"], 3),
        (["policy/loss", "eval/accuracy"], 2),
    ],
)
def test_each_stage_has_its_panels(tmp_path, metrics, panels):
    """Panels are side by side, so the width of the image counts them."""
    records = [{"step": step, **dict.fromkeys(metrics, 0.5)} for step in (1, 2)]
    _, png = picture(tmp_path, records)
    _, width, _ = matplotlib.image.imread(png).shape
    assert width == round(4.6 * 130) * panels


def test_the_values_before_the_run_are_step_0(tmp_path):
    """With the value before the run the plot is a rising line, without it a single dot."""
    source, png = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    source.write_text('{"step": 30, "policy/loss": 30.0}\n')
    widths = []
    for before in ({"policy/loss": 0.0}, None):
        assert plot_curves(source, png, before=before)
        rows, columns = np.nonzero(np.abs(matplotlib.image.imread(png)[..., :3] - BLUE).max(-1) < 0.05)
        widths.append(columns.max() - columns.min())
        if before is not None:
            assert np.corrcoef(rows, columns)[0, 1] < -0.99  # the line rises; row 0 is the top
    assert widths[0] > 300 and widths[1] < 20


@pytest.mark.parametrize("records", [[], [{"step": 1}], [{"step": 1, "policy/loss": None}]])
def test_no_data_no_image(tmp_path, records):
    drawn, png = picture(tmp_path, records)
    assert not drawn and not png.exists()


def test_tables_show_what_changed():
    stream = io.StringIO()
    samples = [
        {"prompt": "12+7= [bold]", "before": "18", "after": "19", "score": 1.0},
        {"prompt": "p", "before": "\x1b[31mx", "after": "y" * 999},
    ]
    before_after(
        {"accuracy": (0.4775, 0.5325), "score_mean": (0.4775, 0.5325), "mean score": (0.5, None)},
        samples,
        {"model": "/run/model"},
        stream=stream,
    )
    words = stream.getvalue().split()
    assert ["accuracy", "47.8%", "53.3%", "+5.5", "points"] == words[words.index("accuracy") :][:5]
    assert ["score_mean", "0.478", "0.533", "+0.055"] == words[words.index("score_mean") :][:4]
    assert ["score", "0.500", "-", "-"] == words[words.index("mean") + 1 :][:4]
    assert ["12+7=", "[bold]", "18", "19", "1.000"] == words[words.index("12+7=") :][:5]
    assert words[-2:] == ["model", "/run/model"]
    assert "\x1b" not in stream.getvalue() and stream.getvalue().count("y") < 300


def test_a_lower_loss_is_an_improvement():
    table = _score_table(
        {"loss": (2.0, 1.5), "perplexity": (2.0, 2.5), "score_mean": (1.0, None)}, "Held-out data"
    )
    assert [cell.style for cell in table.columns[3].cells] == ["green", "", ""]
    assert [str(cell) for cell in table.columns[3].cells] == ["-0.500", "+0.500", "-"]
