"""Tests the TensorBoard tracker by reading its files with TensorBoard's own reader."""

import json

import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.util.tensor_util import make_ndarray

from ppo_ds.tracking.background import BackgroundTracker
from ppo_ds.tracking.tensorboard import TensorBoardTracker
from ppo_ds.types import Histogram

ROW = {
    "prompt": "12+7=",
    "response": "<script>alert(1)</script>\n# no heading",
    "score": 1.0,
    "kl": None,
    "length": 3,
    "tokens": {"ids": [1, 2, 3]},
}


@pytest.fixture(autouse=True)
def first_file_number(monkeypatch):
    """Numbers files from 0, since TensorBoard reads those of one second in the order of their names."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def logged(run_dir, steps, *, resumed_at=0, finish=True):
    """Logs ``steps`` with the loss step + resumed_at / 100, so that repeated steps have other values."""
    tracker = BackgroundTracker(TensorBoardTracker(run_dir, resumed_at=resumed_at))
    tracker.start({"run": {"seed": 1, "name": "näme"}})
    for step in steps:
        tracker.log(step, {"policy/loss": step + resumed_at / 100, "value/loss": None})
    if finish:
        tracker.finish({"exit_reason": "done"})
    tracker._send(lambda: None).wait()  # until all is written
    return tracker


def read(run_dir):
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload()


def losses(run_dir):
    return [(event.step, round(event.value, 3)) for event in read(run_dir).Scalars("policy/loss")]


def texts(run_dir, name):
    events = read(run_dir).Tensors(f"{name}/text_summary")
    return {event.step: make_ndarray(event.tensor_proto).item().decode() for event in events}


def test_metrics_config_and_summary(tmp_path, capfd):
    logged(tmp_path, [1, 2, 3])
    assert losses(tmp_path) == [(1, 1), (2, 2), (3, 3)]
    assert read(tmp_path).Tags()["scalars"] == ["policy/loss"]  # null values are left out
    assert "seed: 1" in texts(tmp_path, "config")[0] and "näme" in texts(tmp_path, "config")[0]
    assert '"exit_reason": "done"' in texts(tmp_path, "summary")[0]
    assert capfd.readouterr() == ("", "")


def test_samples_and_events_are_shown_unchanged(tmp_path):
    tracker = logged(tmp_path, [1], finish=False)
    tracker.samples(1, [ROW, ROW])
    tracker.samples(1, [ROW], "eval")
    tracker.event(1, "alarm", "kl/ref_seq_mean 30 is above 20")
    tracker.finish({})
    train = texts(tmp_path, "samples/train")[1]
    assert train.count("    <script>alert(1)</script>\n    # no heading\n") == 2, "code blocks of Markdown"
    assert json.loads(train.partition("\n")[0]) == {"score": 1.0, "kl": None, "length": 3}
    assert texts(tmp_path, "samples/eval")[1].count("12+7=") == 1
    assert texts(tmp_path, "events/alarm") == {1: "    kl/ref_seq_mean 30 is above 20\n"}


def test_histograms_keep_their_counts_and_edges(tmp_path):
    tracker = logged(tmp_path, [], finish=False)
    tracker.histograms(4, {"adv/hist": Histogram([2, 0, 1], [-1.0, 0.0, 1.0, 2.0])})
    tracker.finish({})
    (event,) = read(tmp_path).Histograms("adv/hist")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num) == (4, -1, 2, 3)
    assert (value.sum, value.sum_squares) == (2 * -0.5 + 1.5, 2 * 0.25 + 2.25)
    pairs = list(zip(value.bucket_limit, value.bucket, strict=True))
    assert pairs == [(-1, 0), (0, 2), (1, 0), (2, 1)]


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path):
    logged(tmp_path, [1, 2, 3, 4], finish=False)
    logged(tmp_path, [3, 4, 5], resumed_at=2)
    assert losses(tmp_path) == [(1, 1), (2, 2), (3, 3.02), (4, 4.02), (5, 5.02)]
    assert sorted(texts(tmp_path, "config")) == [0, 2]


def test_a_run_that_starts_again_before_its_first_checkpoint_replaces_all_steps(tmp_path):
    tracker = logged(tmp_path, [1, 2, 3], finish=False)
    tracker.samples(0, [ROW, ROW], "eval")
    tracker = logged(tmp_path, [1], finish=False)
    tracker.samples(0, [ROW], "eval")
    tracker.finish({})
    assert losses(tmp_path) == [(1, 1)]
    # the reader of the other tests hides repeated scalars and histograms, the server's hides texts too
    shown = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(shown.Tensors("samples/eval/text_summary")) == 1


def test_a_rolled_back_run_replaces_the_steps_too(tmp_path):
    tracker = logged(tmp_path, [1, 2, 3], finish=False)
    tracker.rewind(1)
    for step in (2, 3):
        tracker.log(step, {"policy/loss": 10.0 * step})
    tracker.finish({})
    assert losses(tmp_path) == [(1, 1), (2, 20), (3, 30)]
