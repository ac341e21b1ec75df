"""Tests weighted rewards: sums by hand, MiniMind's mix, running moments over ranks, keys in errors."""

import json
import math
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from transformers import AutoModelForSequenceClassification, LlamaConfig

import launch.composing  # noqa: F401  defines the functions that config files use
from ppo_ds.background.pending import Pending
from ppo_ds.config.targets import bind
from ppo_ds.errors import UserError
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.rewards.base import Responses, RewardError, SlowTextReward, TextReward
from ppo_ds.rewards.weighted import AnswerMix
from ppo_ds.types import Scores
from tests.rewards.reward_cases import VOCAB, Placed, loaded, make_rollout, save_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDENS = ROOT / "tests" / "goldens"
from tests.goldens.golden_io import load

MIXTURE, MIX = "ppo_ds.rewards.weighted.WeightedReward", "ppo_ds.rewards.weighted.AnswerMix"
FORM = "<think>\na\n</think>\n<answer>\n{}\n</answer>"


class Looked(TextReward):
    """Looks up the score of a text in a table; records the texts."""

    def __init__(self, table: dict[str, float], *, tokenizer):
        super().__init__(tokenizer)
        self.table, self.asked = table, []

    def score_responses(self, responses):
        self.asked.append(responses)
        return torch.tensor([self.table[text] for text in responses.texts])


class ByToken:
    """A reward that reads ids: a per-token score of 1, and a row score of 10."""

    def __init__(self, total: float = 10.0):
        self.total = total

    def __call__(self, rollout):
        mask = rollout.response_mask.float()
        return Scores(torch.full((len(rollout),), self.total), mask, {"tokens": mask.sum(1)})


class Failing:
    def __call__(self, rollout):
        return [][1]


def spec(target, **keys):
    return {"_target_": target if "." in target else f"{__name__}.{target}", **keys}


def looked(**table):
    return spec("Looked", table=table)


@pytest.fixture
def build(tokenizer):
    """Builds a reward from its config section, with the services of one process."""

    def run(section, reduce=lambda x: x, **services):
        return bind(section, "reward")(tokenizer=tokenizer, reduce=reduce, **services)

    return run


@pytest.fixture
def rolled(tokenizer):
    return lambda *texts, rows=None: make_rollout(tokenizer, [("q", text) for text in texts], rows)


def refusals(section):
    with pytest.raises(UserError) as caught:
        bind(section, "reward")
    return caught.value.problems


# -- the sum


def test_parts_are_clipped_weighted_and_added(build, rolled):
    parts = {
        "a": {"weight": 2, "clip": 3, "reward": looked(x=5.0, y=-1.0, z=-9.0)},
        "b": {"weight": -0.5, "reward": looked(x=1.0, y=10.0, z=0.0)},
        "watched": {"weight": 0, "reward": looked(x=7.0, y=8.0, z=9.0)},
    }
    scores = build(spec(MIXTURE, parts=parts))(rolled("x", "y", "z"))
    # 2 * 3 - 0.5, 2 * -1 - 5, 2 * -3 - 0
    assert scores.total.tolist() == [5.5, -7.0, -6.0] and scores.total.dtype == torch.float32
    components = {name: column.tolist() for name, column in scores.components.items()}
    assert components == {"a": [3.0, -1.0, -3.0], "b": [1.0, 10.0, 0.0], "watched": [7.0, 8.0, 9.0]}
    assert scores.per_token.abs().max() == 0


def test_per_token_scores_and_components_of_parts_are_kept(build, rolled):
    parts = {
        "text": {"reward": looked(xx=1.0, y=2.0)},
        "ids": {"weight": 0.25, "clip": 4, "reward": spec("ByToken")},
    }
    scores = build(spec(MIXTURE, parts=parts))(rolled("xx", "y"))
    assert scores.total.tolist() == [2.0, 3.0]  # the part "ids" adds 0.25 * 4
    # the end token has a score too
    assert scores.per_token.tolist() == [[0.25, 0.25, 0.25], [0.25, 0.25, 0.0]]
    assert {name: column.tolist() for name, column in scores.components.items()} == {
        "text": [1, 2],
        "ids": [4 + 3, 4 + 2],  # with the scores of its tokens
        "ids/tokens": [3, 2],
    }


def test_a_part_may_read_the_text_inside_a_tag(build, rolled):
    form = FORM.format("b")
    parts = {
        "all": {"reward": looked(**{form: 1.0, "c": 2.0})},
        "inner": {"inside": "answer", "reward": looked(**{"b": 10.0, "": 20.0})},
    }
    assert build(spec(MIXTURE, parts=parts))(rolled(form, "c")).total.tolist() == [11.0, 22.0]


def test_errors_name_the_part(build, rolled):
    fine = {"reward": looked(x=1.0)}
    reward = build(spec(MIXTURE, parts={"fine": fine, "mine": {"reward": spec("Failing")}}))
    with pytest.raises(IndexError) as caught:  # the exception of the user's code is not replaced
        reward(rolled("x"))
    assert caught.value.__notes__ == ["in reward.parts.mine"]
    reward = build(
        spec(MIXTURE, parts={"fine": fine, "right": {"reward": spec("ppo_ds.rewards.rules.NumericReward")}})
    )
    with pytest.raises(RewardError, match=r"^reward.parts.right.reward.column=answer: no such column"):
        reward(rolled("x"))
    reward = build(
        spec(
            MIXTURE,
            parts={
                "ids": {"weight": 0, "reward": spec("ByToken")},
                "text": {"reward": looked(xx=1.0, y=2.0)},
            },
        )
    )
    reward._parts["ids"].reward.total = math.nan
    with pytest.raises(RewardError, match="a score is not finite: nan for row 0, prompt ") as caught:
        reward(rolled("x"))
    assert caught.value.__notes__ == ["in reward.parts.ids"]


# -- the whole response and its answer


def test_the_seeds_printed_mix(tokenizer):
    (case,) = [
        case
        for case in load(GOLDENS / "seed_examples.json", to="torch")["cases"]
        if case["id"] == "c_score_mix"
    ]
    whole, answer, wanted = (
        torch.as_tensor(column).tolist() for column in (*case["inputs"].values(), case["outputs"]["score"])
    )
    texts = [f"w{i} <answer> a{i} </answer>" for i in range(3)]
    table = dict(zip(texts, whole, strict=True)) | {f"a{i}": score for i, score in enumerate(answer)}
    mix = AnswerMix(Looked(table, tokenizer=tokenizer), clip=case["params"]["scale"], tokenizer=tokenizer)
    torch.testing.assert_close(
        mix.score_responses(Responses(({},) * 3, tuple(texts), (True,) * 3)),
        torch.tensor(wanted),
        atol=1e-6,
        rtol=0,
    )


def test_without_an_answer_the_whole_is_the_score(build, rolled):
    table = {"x": 1.7, "<answer>y": -5.0, "<answer>z</answer>": 2.0, "z": 10.0, "": 100.0}
    mix = build(spec(MIX, reward=looked(**table)))
    # the third is 0.4 * 2 + 0.6 * 10
    torch.testing.assert_close(
        mix(rolled("x", "<answer>y", "<answer>z</answer>")).total, torch.tensor([1.7, -5.0, 6.8])
    )
    # both passes score the same number of texts, with or without an answer
    assert [len(asked.texts) for asked in mix.reward.asked] == [3, 3]
    clipped = build(spec(MIX, reward=looked(**table), clip=1.5, whole=0.5, answer=0.25))
    assert clipped(rolled("x", "<answer>y", "<answer>z</answer>")).total.tolist() == [1.5, -1.5, 1.125]


@pytest.mark.parametrize("name", ["minimind", "minimind_reasoning"])
def test_minimind(build, rolled, name):
    """Builds the file's reward, only a model or rules and a model, with a stand-in for the model."""
    form, loose = FORM.format("b"), "<answer>b</answer>"
    section = yaml.safe_load((ROOT / "conf" / "reward" / f"{name}.yaml").read_text())
    model = section["parts"]["model"]
    (model if name == "minimind" else model["reward"])["reward"] = looked(
        **{form: 4.0, loose: -5.0, "plain": 1.0, "b": 2.0, "": 0.0}
    )
    scores = build(section)(rolled(form, loose, "plain"))
    if name == "minimind":
        wanted = [3.0, -3.0, 1.0]
    else:
        wanted = [1.5 + 0.4 * 3 + 0.6 * 2, 0.5 - 0.4 * 3 + 0.6 * 2, 1.0]
    torch.testing.assert_close(scores.total, torch.tensor(wanted))
    assert scores.components.get("format", torch.tensor([])).tolist() == (
        [1.5, 0.5, 0.0] if name == "minimind_reasoning" else []
    )


def test_rules_alone(build, rolled):
    section = yaml.safe_load((ROOT / "conf" / "reward" / "minimind_rules.yaml").read_text())
    assert build(section)(rolled(FORM.format("b"), "aaaaaaaa")).components["format"].tolist() == [1.5, 0.0]
    # the 3-grams of bytes are six times the same
    assert build(section)(rolled("aaaaaaaa")).total.tolist() == [pytest.approx(-5 / 6)]


# -- running moments


NORMALISED = spec(
    MIXTURE,
    parts={
        "a": {
            "normalize": "running",
            "weight": 2,
            "reward": looked(**{"1": 1.0, "3": 3.0, "5": 5.0, "7": 7.0}),
        }
    },
)


def test_scores_are_normalized_by_all_scores_so_far(build, rolled):
    reward = build(NORMALISED)
    first = reward(rolled("1", "3"))  # of 1 and 3: mean 2, std 1
    torch.testing.assert_close(first.total, torch.tensor([-2.0, 2.0]))
    second = reward(rolled("5", "7"))  # of 1, 3, 5 and 7: mean 4, variance 5
    torch.testing.assert_close(second.total, torch.tensor([2 / 5**0.5, 6 / 5**0.5]))
    torch.testing.assert_close(second.components["a"], torch.tensor([1 / 5**0.5, 3 / 5**0.5]))
    assert second.components["a_raw"].tolist() == [5.0, 7.0]


def test_the_clip_comes_after_the_normalization(build, rolled):
    parts = {"a": {**NORMALISED["parts"]["a"], "clip": 0.5}}
    assert build(spec(MIXTURE, parts=parts))(rolled("5", "7")).total.tolist() == [-1.0, 1.0]


def test_held_out_scores_are_not_normalized_and_not_counted(build, rolled):
    reward = build(NORMALISED)
    reward(rolled("1", "3"))
    before = reward.state_dict()
    scores = reward.start_evaluation(rolled("5", "7")).result()
    assert scores.total.tolist() == [10.0, 14.0] and reward.state_dict() == before
    torch.testing.assert_close(reward(rolled("5", "7")).total, torch.tensor([2 / 5**0.5, 6 / 5**0.5]))


def test_moments_are_those_of_all_ranks(tokenizer, on_ranks, rolled):
    """In two calls, ranks with different numbers of rows get the same as one rank with all rows."""

    def run(shares):
        def work(rank, reduce):
            reward = bind(NORMALISED, "reward")(tokenizer=tokenizer, reduce=reduce)
            given = [reward(rolled(*texts)).total for texts in shares[rank]]
            return given, reward.state_dict()

        return on_ranks(len(shares), work)

    ((alone, state),) = run([[("1", "3", "7"), ("5", "5")]])
    (left, right) = run([[("1",), ("5",)], [("3", "7"), ("5",)]])
    for call in range(2):
        torch.testing.assert_close(torch.cat([left[0][call], right[0][call]]), alone[call])
    assert left[1] == right[1]
    moments, whole = left[1]["moments"]["a"], state["moments"]["a"]
    assert moments["count"] == 5 and moments == {name: pytest.approx(value) for name, value in whole.items()}


def test_the_state_is_plain_and_can_be_loaded(build, rolled):
    reward, other = build(NORMALISED), build(NORMALISED)
    reward(rolled("1", "3"))
    other.load_state_dict(json.loads(json.dumps(reward.state_dict())))
    for each in (reward, other):
        torch.testing.assert_close(each(rolled("5", "7")).total, torch.tensor([2 / 5**0.5, 6 / 5**0.5]))
    plain = build(spec(MIXTURE, parts={"a": {"reward": looked(x=1.0)}}))
    assert plain.state_dict() == {"moments": {}}
    plain.load_state_dict({"moments": {}})
    with pytest.raises(
        UserError, match="^reward.parts: the parts with normalize=running are none, but a in the checkpoint"
    ):
        plain.load_state_dict(reward.state_dict())


# -- the config section


def test_mistakes_of_all_parts_are_reported_together_with_their_full_keys():
    parts = {
        "quality": {"weight": "much", "reward": spec("ppo_ds.rewards.model.model_reward")},
        "depth": {
            "clip": 0,
            "reward": spec(
                "ppo_ds.rewards.model.model_reward", model={"path": "x", "dtype": "fp64"}, template="chatty"
            ),
        },
        "form": {
            "inside": "<answer>",
            "reward": spec("ppo_ds.rewards.rules.FormatReward", patterns=["ok", "("], tag_scores=1),
        },
        "length": {"wieght": 1, "reward": spec("ppo_ds.rewards.rules.LengthReward", longest=-1)},
        "mix": {"reward": spec(MIX, reward=spec("ppo_ds.rewards.rules.RegexReward"))},
        "none": {"weight": 1},
        "text": {"reward": "format"},
        "typo": {"reward": spec("ppo_ds.rewards.rules.Format")},
        "empty": {"reward": {}},
    }
    lines = refusals(spec(MIXTURE, parts=parts, weights=[1]))
    starts = [
        "reward.weights=[1]: no such key; the keys of reward are parts",
        "reward.parts.quality.reward.model.path is missing",
        "reward.parts.quality.weight=much: must be a number",
        "reward.parts.depth.reward.model.dtype=fp64: must be one of",
        "reward.parts.depth.reward.template=chatty: must be one of auto, chat, pair, concat",
        "reward.parts.depth.clip=0: must be above 0 or null",
        (
            "reward.parts.form.reward.tag_scores=1: no such key; did you mean "
            "reward.parts.form.reward.tag_score?"
        ),
        "reward.parts.form.reward.patterns[1]=(: must be a regular expression",
        (
            "reward.parts.form.inside=<answer>: must be the name of a tag without its brackets, such as "
            "answer or null"
        ),
        "reward.parts.length.wieght=1: no such key; did you mean reward.parts.length.weight?",
        "reward.parts.length.reward.longest=-1: must be at least 1 or null",
        "reward.parts.mix.reward.reward.pattern is missing",
        "reward.parts.none.reward is missing",
        "reward.parts.text.reward=format: must be a section with a _target_",
        "reward.parts.typo.reward._target_=ppo_ds.rewards.rules.Format: cannot be imported",
        "reward.parts.empty.reward._target_ is missing",
    ]
    assert len(lines) == len(starts), lines
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start) and "\n" not in line, line


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        ({}, "reward.parts is missing"),
        (
            dict(parts={}),
            "reward.parts={}: must be one part or more, as NAME: {weight: 1, reward: {_target_: ...}}",
        ),
        (dict(parts=None), "reward.parts=null: must be a mapping"),
        (
            dict(parts={"a": None}),
            "reward.parts.a=null: must be a section with keys reward, weight, normalize, clip, inside",
        ),
    ],
)
def test_no_parts(keys, start):
    (line,) = refusals(spec(MIXTURE, **keys))
    assert line.startswith(start)


@pytest.mark.parametrize("weights", [[0], [0, 0.0]])
def test_all_weights_0(build, weights):
    with pytest.raises(UserError) as caught:
        build(
            spec(
                MIXTURE,
                parts={
                    f"p{i}": {"weight": weight, "reward": spec("ByToken")} for i, weight in enumerate(weights)
                },
            )
        )
    assert caught.value.problems == [
        "reward.parts: every weight is 0, so every total is 0; give one part another weight"
    ]


def test_only_text_rewards_have_inside_and_mix(build):
    def refused(section, line):
        with pytest.raises(UserError) as caught:
            build(section)
        assert caught.value.problems == [line]

    refused(
        spec(MIXTURE, parts={"a": {"inside": "answer", "reward": spec("ByToken")}}),
        "reward.parts.a.inside=answer: ByToken does not read text alone; set it to null",
    )
    refused(
        spec(MIX, reward=spec("ByToken")),
        "reward.reward: ByToken does not read text alone; put an AnswerMix around each of its parts",
    )
    inner = spec(MIXTURE, parts={"b": {"reward": spec("ByToken")}})
    refused(
        spec(MIXTURE, parts={"a": {"reward": inner}}),
        "reward.parts.a.reward: is a weighted reward itself; put its parts beside the others",
    )


def test_tags_that_decoding_removes_are_refused():
    digits = character_tokenizer("0123456789")
    with pytest.raises(
        UserError, match="^reward.parts.a.inside=answer: the actor's tokenizer decodes <answer> to"
    ):
        bind(spec(MIXTURE, parts={"a": {"inside": "answer", "reward": looked(x=1.0)}}), "reward")(
            tokenizer=digits, reduce=None
        )
    with pytest.raises(UserError, match="^reward.tag=final: the actor's tokenizer decodes <final> to"):
        bind(spec(MIX, tag="final", reward=looked(x=1.0)), "reward")(tokenizer=digits)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "conf" / "reward").glob("*.yaml")), ids=lambda file: file.stem
)
def test_every_reward_file_is_valid(file):
    """The only allowed error is that a required value is missing."""
    try:
        bind(OmegaConf.to_container(OmegaConf.load(file), resolve=True), "reward")
    except UserError as error:
        assert [line for line in error.problems if not line.split(":")[0].endswith(" is missing")] == []


# -- a model among the parts


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.5,
    )
    AutoModelForSequenceClassification.from_config(
        LlamaConfig(vocab_size=VOCAB, num_labels=1, **sizes)
    ).save_pretrained(tmp_path / "rm")
    return spec(
        "ppo_ds.rewards.model.model_reward", model={"path": save_tokenizer(tmp_path / "rm"), "dtype": "fp32"}
    )


def services(placed, all_reduce_max=lambda n: n, score_tokens=10_000):
    def load_frozen(load, model, zero, key):
        module = loaded(load, model, key)
        placed.append(Placed(module))
        return module, placed[-1]

    return dict(load_frozen=load_frozen, all_reduce_max=all_reduce_max, score_tokens=score_tokens)


def test_a_model_as_a_part_scores_as_it_does_alone(build, rolled, model):
    rollout = rolled("yes", "<answer>no</answer>", "a longer answer than that")
    alone, inner = (
        build(model, **services([]))(rollout).total,
        build(model, **services([]))(rolled("no")).total,
    )
    parts = {"plain": {"weight": 0.5, "reward": model}, "mix": {"reward": spec(MIX, reward=model)}}
    scores = build(spec(MIXTURE, parts=parts), **services([]))(rollout)
    torch.testing.assert_close(scores.components["plain"], alone, atol=1e-5, rtol=1e-4)
    mixed = torch.stack([alone[0], 0.4 * alone[1] + 0.6 * inner[0], alone[2]])
    torch.testing.assert_close(scores.components["mix"], mixed, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(scores.total, 0.5 * alone + mixed, atol=1e-5, rtol=1e-4)


def test_ranks_with_and_without_tags_run_equally_many_forwards(tokenizer, on_ranks, rolled, model):
    """With a small budget the rank with long texts and <answer> tags would need more forwards."""
    texts = [("x", "y"), ("<answer>a long answer in a tag</answer>", "<answer>another long one</answer>")]

    def work(rank, reduce):
        def all_reduce_max(n):
            return int(reduce(torch.eye(2)[rank] * n).max())

        placed = []
        reward = bind(spec(MIX, reward=model), "reward")(
            tokenizer=tokenizer, **services(placed, all_reduce_max, score_tokens=40)
        )
        placed[0].batches.clear()  # forwards of the start-up audit
        reward(rolled(*texts[rank]))
        return len(placed[0].batches)

    assert on_ranks(2, work) == [4, 4]


def test_keys_in_errors_are_those_of_the_part(build, model):
    parts = {"quality": {"reward": model | {"max_tokens": 5, "template": "chat"}}}
    with pytest.raises(
        UserError,
        match="^reward.parts.quality.reward.template=chat: the reward model's tokenizer has no chat template",
    ):
        build(spec(MIXTURE, parts=parts), **services([]))
    parts = {"quality": {"reward": model | {"model": {"path": "/no/such/model"}}}}
    with pytest.raises(
        UserError, match="^reward.parts.quality.reward.model.path=/no/such/model: no such folder"
    ):
        build(spec(MIXTURE, parts=parts), **services([]))
    parts = {"f": {"reward": spec("ppo_ds.rewards.function.FunctionReward", path="nowhere")}}
    with pytest.raises(UserError, match="^reward.parts.f.reward.path=nowhere: must be pkg.mod:function"):
        build(spec(MIXTURE, parts=parts))


# -- starts that fail


class Background(SlowTextReward):
    """Scores in the background, until cancelled; records its starts and cancellations by name."""

    events: ClassVar[list[str]] = []

    def __init__(self, name: str, fails: bool = False, *, tokenizer):
        super().__init__(tokenizer)
        self.name, self.fails = name, fails

    def start_responses(self, responses):
        if self.fails:
            raise torch.OutOfMemoryError
        self.events.append(f"{self.name} started")
        return Pending(lambda: None, (Future(),), lambda: self.events.append(f"{self.name} cancelled"))


class StartsOnce(Background):
    """Fails in its second start."""

    def start_responses(self, responses):
        pending = super().start_responses(responses)
        self.fails = True
        return pending


def test_parts_that_are_started_are_cancelled_if_another_cannot_start(build, rolled, monkeypatch):
    monkeypatch.setattr(Background, "events", [])
    slow = {name: {"reward": spec("Background", name=name)} for name in ("a", "b")}
    for last in (spec("Failing"), spec("Background", name="c", fails=True)):
        Background.events.clear()
        reward = build(spec(MIXTURE, parts=slow | {"c": {"reward": last}}))
        with pytest.raises((IndexError, torch.OutOfMemoryError)):
            reward.start_scoring(rolled("x"))
        assert Background.events == ["a started", "b started", "a cancelled", "b cancelled"]


def test_a_mix_cancels_the_first_score_if_the_second_cannot_start(build, rolled, monkeypatch):
    monkeypatch.setattr(Background, "events", [])
    reward = build(spec(MIX, reward=spec("StartsOnce", name="a")))
    with pytest.raises(torch.OutOfMemoryError):
        reward.start_scoring(rolled("x"))
    assert Background.events == ["a started", "a cancelled"]


def test_all_started_parts_end_once(build, rolled, monkeypatch):
    monkeypatch.setattr(Background, "events", [])
    reward = build(spec(MIXTURE, parts={name: {"reward": spec("Background", name=name)} for name in "ab"}))
    reward.start_scoring(rolled("x")).cancel()
    assert Background.events == ["a started", "b started", "a cancelled", "b cancelled"]
