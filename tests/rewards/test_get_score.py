"""Tests models that score chats with their own Python code, loaded from a folder like InternLM2's."""

import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaModel, dynamic_module_utils

from ppo_ds.config.targets import bind
from ppo_ds.engine.frozen import freeze
from ppo_ds.errors import UserError
from ppo_ds.rewards.base import Responses, RewardError
from tests.rewards.old_code import old_code_score, save_old_code
from tests.rewards.own_code import BOTH, GET_SCORE, GET_SCORES, by_hand, save_own_code
from tests.rewards.reward_cases import VOCAB, loaded, make_rollout, save_tokenizer

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]
ROWS = [
    {"messages": CHAT},
    {},
    {"messages": [{"role": "user", "content": "a much longer question than the others are"}]},
    {},
]
RESPONSES = [("rendered for the actor", "yo"), ("plain", "x"), ("rendered", "an answer"), ("b", "")]
CPU = SimpleNamespace(device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Makes transformers copy such code to this folder instead of the user's cache."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def build(tokenizer):
    """Builds a reward from a config section.

    ``build.module`` is the model, ``build.notes`` the lines of the banner.
    """

    def built(path, *, score_tokens=10_000, all_reduce_max=lambda n: n, **settings):
        def load_frozen(load, model, zero, key):
            built.module = loaded(load, model, key)
            return built.module, freeze(
                built.module, world=CPU, offload=zero.offload_params, deepspeed_config=None
            )

        model = {"path": path, "dtype": "fp32", "trust_remote_code": True} | settings.pop("model", {})
        make = bind(
            {"_target_": "ppo_ds.rewards.get_score.get_score_reward", "model": model, **settings}, "reward"
        )
        built.notes = []
        services = dict(
            tokenizer=tokenizer,
            load_frozen=load_frozen,
            all_reduce_max=all_reduce_max,
            score_tokens=score_tokens,
            note=built.notes.append,
        )
        reward = make(**services)
        built.module.model.batches.clear()
        return reward

    return built


def expected(path):
    messages = [
        row.get("messages", [{"role": "user", "content": prompt}])
        for row, (prompt, _) in zip(ROWS, RESPONSES, strict=True)
    ]
    return torch.stack(
        [by_hand(path, chat, response) for chat, (_, response) in zip(messages, RESPONSES, strict=True)]
    )


def test_scores_are_those_of_the_models_own_code(tmp_path, build, tokenizer):
    path = save_own_code(tmp_path / "tiny_rm")
    rollout = make_rollout(tokenizer, RESPONSES, ROWS)
    reward = build(path)
    scores = reward(rollout)
    torch.testing.assert_close(scores.total, expected(path), atol=1e-5, rtol=1e-5)
    assert scores.total.std() > 0.1 and scores.total.dtype == torch.float32 and not scores.per_token.any()
    assert build.module.model.batches == [4]
    assert not build.module.training and not any(p.requires_grad for p in build.module.parameters())
    assert build.notes and not any(note.startswith("warning") for note in build.notes)


def test_batches_keep_to_the_budget_and_change_nothing(tmp_path, build, tokenizer):
    path = save_own_code(tmp_path / "tiny_rm")
    rollout = make_rollout(tokenizer, RESPONSES, ROWS)
    # lengths in tokens plus 8 per message: 67 (question 42, response 9), 42 (8, 8 and 2), 22, 17
    for budget, batches in ((1, [1, 1, 1, 1]), (126, [1, 3]), (134, [2, 2]), (67 * 4, [4])):
        reward = build(path, score_tokens=budget)
        torch.testing.assert_close(reward(rollout).total, expected(path), atol=1e-5, rtol=1e-5)
        assert sorted(build.module.model.batches) == batches


def test_without_get_scores_responses_are_scored_one_by_one(tmp_path, build, tokenizer):
    path = save_own_code(tmp_path / "tiny_rm", GET_SCORE)
    reward = build(path)
    torch.testing.assert_close(
        reward(make_rollout(tokenizer, RESPONSES, ROWS)).total, expected(path), atol=1e-5, rtol=1e-5
    )
    assert build.module.model.batches == ["one"] * 4 and not any(
        note.startswith("warning") for note in build.notes
    )


NEIGHBOURS = GET_SCORE + GET_SCORES.format(returned="(scores - scores.mean())[:, 0].tolist()")


def test_get_scores_that_disagrees_with_get_score_is_not_used(tmp_path, build, tokenizer):
    path = save_own_code(tmp_path / "tiny_rm", NEIGHBOURS)
    rollout = make_rollout(tokenizer, RESPONSES, ROWS)
    reward = build(path)
    (warning,) = [note for note in build.notes if note.startswith("warning")]
    assert warning.startswith(
        f"warning    reward.model.path={path}: the score of a text alone differs by up to "
    ) and warning.endswith("get_score is called one by one instead of get_scores")
    torch.testing.assert_close(reward(rollout).total, expected(path), atol=1e-5, rtol=1e-5)
    assert build.module.model.batches == ["one"] * 4
    with pytest.raises(
        UserError, match=r"^reward.model.path=.*get_score is called one by one.*reward.audit=strict"
    ):
        build(path, audit="strict")
    # without the audit, get_scores is used
    assert not torch.allclose(build(path, audit="off")(rollout).total, expected(path))
    assert build.notes == []


def test_ranks_agree_on_how_to_score(tmp_path, build, tokenizer):
    """If get_scores is wrong on another rank, this rank does not use it either."""
    reward = build(save_own_code(tmp_path / "tiny_rm"), all_reduce_max=lambda n: 1)
    reward(make_rollout(tokenizer, RESPONSES, ROWS))
    assert build.module.model.batches == ["one"] * 4


@pytest.mark.parametrize(
    "returned",
    "scores.tolist() scores scores.squeeze() list(scores) scores.squeeze().tolist() scores.numpy()".split(),
)
def test_scores_of_many_shapes(tmp_path, build, tokenizer, returned):
    path = save_own_code(tmp_path / "tiny_rm", GET_SCORE + GET_SCORES.format(returned=returned))
    for budget in (1, 10_000):  # squeeze() turns a single score into a scalar
        scores = build(path, score_tokens=budget, audit="off")(make_rollout(tokenizer, RESPONSES, ROWS)).total
        torch.testing.assert_close(scores, expected(path), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [("bf16", torch.bfloat16, 0.05), ("fp16", torch.float16, 0.01)]
)
def test_half_precision(tmp_path, build, tokenizer, name, dtype, tolerance):
    path = save_own_code(tmp_path / "tiny_rm")
    scores = build(path, model={"dtype": name})(make_rollout(tokenizer, RESPONSES, ROWS)).total
    assert {p.dtype for p in build.module.parameters()} == {dtype} and scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected(path), atol=tolerance * 8, rtol=0)
    assert not any(note.startswith("warning") for note in build.notes)


def test_foreign_code_runs_only_when_trusted(tmp_path, build):
    path = save_own_code(tmp_path / "tiny_rm")
    with pytest.raises(UserError) as caught:
        build(path, model={"trust_remote_code": False})
    (problem,) = caught.value.problems
    assert problem.startswith("reward.model.trust_remote_code=false: ") and problem.endswith(
        "then set reward.model.trust_remote_code=true"
    )
    assert not (Path(path) / "imported").exists()
    build(path)
    assert (Path(path) / "imported").exists()


def test_sharding_is_refused_before_anything_is_loaded(tmp_path, build):
    path = save_own_code(tmp_path / "tiny_rm")
    with pytest.raises(UserError, match="^reward.zero.stage=3: .*use stage 0"):
        build(path, zero={"stage": 3})
    assert not (Path(path) / "imported").exists()
    build(path, zero={"offload_params": True})


def test_invalid_models(tmp_path, build):
    plain = str(tmp_path / "plain_rm")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    LlamaModel(config).save_pretrained(plain)
    save_tokenizer(plain)
    with pytest.raises(
        UserError,
        match=r"^reward.model.path=.*: a LlamaModel has no get_score\(tokenizer, chat\); .* use reward=model",
    ):
        build(plain)
    broken = save_own_code(
        tmp_path / "broken_rm", BOTH + "\n    def post_init(self):\n        self.config.gone()\n"
    )
    with pytest.raises(
        UserError, match="^reward.model.path=.*: its own code fails with transformers 5.*AttributeError.*gone"
    ):
        build(broken)
    headless = save_own_code(tmp_path / "headless_rm")
    weights = load_file(Path(headless) / "model.safetensors")
    save_file(
        {"embed.weight": weights["embed.weight"]},
        Path(headless) / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(UserError, match="^reward.model.path=.*weights missing from its files .*v_head"):
        build(headless)
    with pytest.raises(UserError, match="^reward.model.path=.*no such folder"):
        build(str(tmp_path / "nowhere"))
    lost = save_own_code(tmp_path / "lost_rm")
    shutil.move(Path(lost) / "modeling_tiny.py", tmp_path)
    with pytest.raises(UserError, match="^reward.model.path=.*modeling_tiny.py"):
        build(lost)


def test_a_non_finite_score_stops_the_run(tmp_path, build, tokenizer):
    reward = build(save_own_code(tmp_path / "tiny_rm"))
    build.module.model.v_head.weight.data.fill_(float("nan"))
    with pytest.raises(RewardError, match="scored nan for row 0, response 'yo'; try reward.model.dtype=fp32"):
        reward(make_rollout(tokenizer, RESPONSES, ROWS))


def test_too_few_scores_stop_the_run(tmp_path, build):
    reward = build(
        save_own_code(
            tmp_path / "tiny_rm", GET_SCORE + GET_SCORES.format(returned="scores[:-1, 0].tolist()")
        ),
        audit="off",
    )
    with pytest.raises(RewardError, match="its code returned 1 scores for 2 chats"):
        reward.score_responses(Responses(({"prompt_text": "p"},) * 2, ("a", "b"), (True, True)))


RAISES = """
    def get_score(self, tokenizer, conversation):
        raise KeyError("no such" + chr(10) + "thing")
"""
NOTHING = """
    def get_score(self, tokenizer, conversation):
        return None
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [(RAISES, "KeyError: .*no such.*thing"), (NOTHING, "TypeError: it returned None, which is no score")],
)
def test_code_that_returns_no_score(tmp_path, build, tokenizer, code, words):
    path = save_own_code(tmp_path / "tiny_rm", code)
    line = f"^reward.model.path={path}: its get_score fails: {words}"
    with pytest.raises(UserError, match=line) as caught:  # while starting
        build(path)
    assert len(caught.value.problems) == 1 and "\n" not in caught.value.problems[0]
    with pytest.raises(RewardError, match=line):  # while training
        build(path, audit="off")(make_rollout(tokenizer, RESPONSES, ROWS))


@pytest.fixture
def sentencepiece(monkeypatch):
    """Provides an importable module of that name, whether or not the package is installed."""
    stand_in = ModuleType("sentencepiece")
    stand_in.__spec__ = ModuleSpec("sentencepiece", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", stand_in)


def test_code_for_transformers_4_gives_its_scores(tmp_path, build, tokenizer, sentencepiece):
    path = save_old_code(tmp_path / "old_rm")
    reward = build(path)
    texts = ("What is 2+2?", "It is 4."), ("hi", "")
    responses = Responses(
        tuple({"messages": [{"role": "user", "content": prompt}]} for prompt, _ in texts),
        tuple(response for _, response in texts),
        (True, True),
    )
    by_formula = torch.tensor([old_code_score(path, prompt + response) for prompt, response in texts])
    torch.testing.assert_close(reward.score_responses(responses), by_formula, atol=1e-4, rtol=1e-5)
    (note,) = [note for note in build.notes if "get_scores" in note]
    assert note.startswith(f"audit      reward.model.path={path}: its get_scores fails: AttributeError: ")
    assert "batch_encode_plus" in note and "(get_score is called one by one instead)" in note
    assert not any(note.startswith("warning") for note in build.notes)
    build(path, audit="strict")  # the scores of get_score are valid


def test_code_for_transformers_4_leaves_random_states_alone(tmp_path, build, sentencepiece):
    path = save_old_code(tmp_path / "old_rm")
    before = torch.get_rng_state()
    build(path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_missing_sentencepiece_is_named(tmp_path, build, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    path = save_old_code(tmp_path / "old_rm")
    with pytest.raises(UserError) as caught:
        build(path)
    assert caught.value.problems == [
        f"reward.model.path={path}: its tokenizer needs the package sentencepiece, which is not installed; "
        "run: pip install -c constraints.txt -e '.[sentencepiece]'"
    ]


def test_a_failing_get_scores_without_the_audit_stops_the_run(tmp_path, build, sentencepiece):
    reward = build(save_old_code(tmp_path / "old_rm"), audit="off")
    with pytest.raises(RewardError, match="its get_scores fails: AttributeError: .*batch_encode_plus"):
        reward.score_responses(Responses(({"prompt_text": "p"},), ("a",), (True,)))


def test_the_prepared_config():
    file = Path(__file__).parents[2] / "conf" / "reward" / "internlm2_reward.yaml"
    spec = yaml.safe_load(file.read_text())
    with pytest.raises(
        UserError, match="^reward.model.trust_remote_code=false: .*internlm/internlm2-1_8b-reward"
    ):
        bind(spec, "reward")(
            tokenizer=None,
            load_frozen=lambda load, model, zero, key: loaded(load, model, key),
            all_reduce_max=max,
            score_tokens=1,
        )
