import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from ppo_ds.config.sections.models import FrozenZeroConfig
from ppo_ds.config.targets import bind
from ppo_ds.errors import UserError
from ppo_ds.rewards.base import RewardError
from tests.rewards.model_cases import DEBERTA, GPT2, LLAMA, TINY, by_hand, save_model
from tests.rewards.reward_cases import BOS, CHAT_TEMPLATE, EOS, make_rollout

ANSWERS = [
    ("1+1=", "2"),
    ("Say something long, please.", "no"),
    ("a", "a longer answer than that"),
    ("b", ""),
]
FINISHED = [True, False, True, True]


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_the_actors_own_tokenizer_text_path_equals_ids_path(tmp_path, build, tokenizer, config, pad):
    path = save_model(tmp_path / "rm", config, pad=pad)
    rollout = make_rollout(tokenizer, ANSWERS, finished=FINISHED)
    scores = build(path)(rollout)
    alone = torch.stack(
        [
            by_hand(path, row[mask].tolist())
            for row, mask in zip(rollout.ids, rollout.attention_mask, strict=True)
        ]
    )
    torch.testing.assert_close(scores.total, alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        build.placed.module(rollout.ids, rollout.attention_mask), alone, atol=1e-4, rtol=1e-4
    )
    assert (
        alone.std() > 0.01
        and scores.components == {}
        and scores.per_token.shape == rollout.response_mask.shape
    )


def test_batching_changes_nothing(tmp_path, build, tokenizer):
    path = save_model(tmp_path / "rm", GPT2)
    rollout = make_rollout(tokenizer, ANSWERS, finished=FINISHED)
    together = build(path)(rollout).total
    # width: <bos>, 27 tokens of the longest prompt, 2 of its response
    assert build.placed.batches == [(4, 30)]
    torch.testing.assert_close(build(path, score_tokens=1)(rollout).total, together, atol=1e-5, rtol=1e-4)
    assert [shape[0] for shape in build.placed.batches] == [1, 1, 1, 1]
    build(path, score_tokens=60)(rollout)
    assert all(rows * width <= 60 for rows, width in build.placed.batches)
    for i in range(len(ANSWERS)):
        single = build(path)(rollout.select(torch.tensor([i]))).total
        torch.testing.assert_close(single, together[i : i + 1], atol=1e-5, rtol=1e-4)


def test_every_rank_runs_as_many_forwards_as_the_one_with_most(tmp_path, build, tokenizer):
    path = save_model(tmp_path / "rm", LLAMA)
    rollout = make_rollout(tokenizer, ANSWERS)
    asked = []
    alone = build(path)(rollout).total
    scores = build(path, ranks=lambda n: asked.append(n) or 3)(rollout).total
    assert asked == [1] and len(build.placed.batches) == 3
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=1e-4)


def test_deberta_reads_pairs(tmp_path, build, tokenizer):
    path = save_model(tmp_path / "rm", DEBERTA, cross_encoder=True)
    own = AutoTokenizer.from_pretrained(path)
    scores = build(path)(make_rollout(tokenizer, ANSWERS[:3], finished=FINISHED[:3])).total
    for score, (prompt, response) in zip(scores, ANSWERS[:3], strict=True):
        inputs = own(prompt, response)
        assert max(inputs["token_type_ids"]) == 1
        torch.testing.assert_close(
            score,
            by_hand(path, inputs["input_ids"], token_type_ids=inputs["token_type_ids"]),
            atol=1e-5,
            rtol=1e-4,
        )


def test_a_chat_template_is_used_if_there_is_one(tmp_path, build, tokenizer):
    path = save_model(tmp_path / "rm", LLAMA, template=CHAT_TEMPLATE)
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    rollout = make_rollout(
        tokenizer, [("rendered for the actor", "yo"), ("plain", "x")], [{"messages": messages}, {}]
    )
    expected = [
        [*messages, {"role": "assistant", "content": "yo"}],
        [{"role": "user", "content": "plain"}, {"role": "assistant", "content": "x"}],
    ]
    own = AutoTokenizer.from_pretrained(path)
    by_template = [own.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in expected]
    scores = build(path)(rollout).total
    torch.testing.assert_close(
        scores, torch.stack([by_hand(path, ids) for ids in by_template]), atol=1e-4, rtol=1e-4
    )
    text = build(path, template="concat")(rollout).total
    concat = [BOS, *own("plainx", add_special_tokens=False)["input_ids"], EOS]
    torch.testing.assert_close(text[1], by_hand(path, concat), atol=1e-4, rtol=1e-4)


def test_texts_are_truncated_to_the_models_positions(tmp_path, build, tokenizer):
    rollout = make_rollout(tokenizer, [("x" * 100, "yes")])
    path = save_model(tmp_path / "rm", GPT2)
    assert build(path)(rollout).total.isfinite().all() and build.placed.batches == [(1, 48)]
    build(path, max_tokens=9)(rollout)
    assert build.placed.batches == [(1, 9)]
    with pytest.raises(UserError, match="reward.max_tokens=49: the reward model has 48 positions"):
        build(path, max_tokens=49)


def test_zero_settings_reach_the_engine(tmp_path, build):
    build(save_model(tmp_path / "rm", LLAMA), zero=FrozenZeroConfig(stage=3, offload_params=True))
    assert build.zero == FrozenZeroConfig(stage=3, offload_params=True) and build.dtype == "fp32"


def test_a_language_model_is_refused(tmp_path, build):
    with pytest.raises(UserError, match="^reward.model.path=.*no trained score head"):
        build(save_model(tmp_path / "rm", LLAMA, AutoModelForCausalLM))


def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused(tmp_path, build):
    small = LlamaConfig(**TINY | {"vocab_size": 100})
    with pytest.raises(UserError, match="^reward.model.path=.*ids up to 260, its embedding only 100 rows"):
        build(save_model(tmp_path / "rm", small))


def test_a_non_finite_score_stops_the_run(tmp_path, build, tokenizer):
    reward = build(save_model(tmp_path / "rm", LLAMA))
    build.placed.module.model.score.weight.data.fill_(float("nan"))
    with pytest.raises(RewardError, match="nan for row 0, response '2'"):
        reward(make_rollout(tokenizer, ANSWERS))


def test_concat_of_a_chat_depends_on_the_vocabulary(tmp_path, build, tokenizer):
    rollout = make_rollout(tokenizer, [("<u>hi", "yo")], [{"messages": [{"role": "user", "content": "hi"}]}])
    alike = save_model(tmp_path / "alike", LLAMA)
    own = tokenizer.encode_many(["<u>hiyo", "hi\nyo"], special_tokens=False)
    torch.testing.assert_close(
        build(alike)(rollout).total[0], by_hand(alike, [BOS, *own[0], EOS]), atol=1e-4, rtol=1e-4
    )
    other = save_model(tmp_path / "other", LlamaConfig(**TINY | {"vocab_size": TINY["vocab_size"] + 1}))
    larger = AutoTokenizer.from_pretrained(other)
    larger.add_tokens(["one more"])
    larger.save_pretrained(other)
    torch.testing.assert_close(
        build(other)(rollout).total[0], by_hand(other, [BOS, *own[1], EOS]), atol=1e-4, rtol=1e-4
    )


def test_a_template_that_refuses_a_chat_is_found_before_training(tmp_path, build):
    path = save_model(
        tmp_path / "rm",
        LLAMA,
        template="{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
        + CHAT_TEMPLATE,
    )
    with pytest.raises(
        UserError,
        match=(
            "^reward.template=chat: .*roles user, assistant, user, assistant .*one turn "
            "only.*; set reward.template=pair"
        ),
    ):
        build(path, audit="report")


@pytest.mark.parametrize("given", [0, -3])
def test_max_tokens_is_a_count(given):
    with pytest.raises(UserError, match=rf"^reward\.max_tokens={given}: "):
        bind(
            {
                "_target_": "ppo_ds.rewards.model.model_reward",
                "model": {"path": "org/rm"},
                "max_tokens": given,
            },
            "reward",
        )
