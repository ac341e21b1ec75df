"""Tests the findings of the audit for sound models and for models that are broken on purpose."""

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, RobertaConfig

from ppo_ds.config.targets import bind
from ppo_ds.errors import UserError
from ppo_ds.rewards.audit import DIALOGUES, Findings, probes
from tests.rewards.model_cases import DEBERTA, GPT2, LLAMA, TINY, save_model
from tests.rewards.reward_cases import CHAT_TEMPLATE, VOCAB

LONG_GPT2 = GPT2Config(
    vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=1024, initializer_range=0.5, num_labels=1
)
ROBERTA = RobertaConfig(**TINY, max_position_embeddings=600, type_vocab_size=2, pad_token_id=2)


def warnings(build):
    """Returns the text after the model's name of each warning."""
    lines = [note for note in build.notes if note.startswith("warning    ")]
    assert all(line.startswith("warning    reward.model.path=") and "\n" not in line for line in lines)
    return [line.split(": ", 1)[1] for line in lines]


def remark(build):
    (line,) = [note for note in build.notes if note.startswith("audit      reward.model.path=")]
    return line.split(": ", 1)[1]


def instead(forward):
    """Breaks a model: ``forward(module, ids, mask)`` replaces the forward, which remains as module.scores."""

    def broken(module):
        module.forward = lambda ids, attention_mask, token_type_ids=None: forward(module, ids, attention_mask)
        return module

    return broken


def own_of_each(module, ids, mask):
    return torch.cat([module.scores(row[m][None], m[m][None]) for row, m in zip(ids, mask, strict=True)])


def hidden_of(module, ids, mask):
    return module.model.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state


def as_they_lie(module, ids, mask):
    """Scores the last token of each row, without passing position ids."""
    last = torch.where(mask.bool(), torch.arange(mask.shape[1]), -1).amax(1)
    return module.model.score(hidden_of(module, ids, mask)[torch.arange(len(ids)), last])[:, 0]


neighbours = instead(lambda module, ids, mask: module.scores(ids, mask) + module.scores(ids, mask).mean())
last_column = instead(lambda module, ids, mask: module.model.score(hidden_of(module, ids, mask))[:, -1, 0])
length = instead(lambda module, ids, mask: mask.sum(1).float())
halves = instead(
    lambda module, ids, mask: own_of_each(module, ids, mask).masked_fill(
        torch.arange(len(ids)) % 2 == 1, float("nan")
    )
)


def test_a_sound_model(tmp_path, build):
    path = save_model(tmp_path / "rm", LLAMA)
    before = torch.get_rng_state()
    build(path, audit="strict")
    assert warnings(build) == [] and len(build.notes) == 1
    assert remark(build).startswith("a fitting response scores above an empty one in ")
    assert torch.equal(torch.get_rng_state(), before)  # the audit does not change the random state of the run
    assert len(build.placed.batches) == 2 + len(DIALOGUES) and build.placed.batches[0] == (
        3 * len(DIALOGUES),
        build.placed.batches[0][1],
    )
    build(path)
    assert build.placed.batches == [] and build.notes == []


@pytest.mark.parametrize("off", ["off", False])
def test_off_as_yaml_reads_it(tmp_path, build, tokenizer, off):
    path = save_model(tmp_path / "rm", LLAMA)
    build(path, audit=off)
    assert build.placed.batches == []
    bind({"_target_": "ppo_ds.rewards.model.model_reward", "model": {"path": path}, "audit": off}, "reward")
    with pytest.raises(UserError, match="reward.audit=true: must be one of off, report, strict"):
        bind(
            {"_target_": "ppo_ds.rewards.model.model_reward", "model": {"path": path}, "audit": True},
            "reward",
        )


@pytest.mark.parametrize("broken", [neighbours, last_column], ids=["neighbours", "last_column"])
def test_scores_that_depend_on_the_batch(tmp_path, build, broken):
    path = save_model(tmp_path / "rm", LLAMA)
    build(path, audit="report", broken=broken)
    (line, *_) = warnings(build)
    assert line.startswith("the score of a text alone differs by up to ") and line.endswith(
        "a response's score would depend on the rest of its batch"
    )
    with pytest.raises(UserError) as caught:
        build(path, audit="strict", broken=broken)
    assert (
        f"reward.model.path={path}: {line} (reward.audit=strict; with report it is a warning)"
        in caught.value.problems
    )


def test_positions_that_include_the_padding(tmp_path, build):
    """If position ids are not passed, GPT-2's absolute positions include the padding."""
    path = save_model(tmp_path / "rm", LONG_GPT2)
    build(path, audit="report")
    assert warnings(build) == []
    build(path, audit="report", broken=instead(as_they_lie))
    (line,) = warnings(build)
    assert line.startswith("with padding on the left its scores differ by up to ")
    assert line.endswith("but a critic initialized from this model reads prompts padded on the left")
    with pytest.raises(UserError, match="padded on the left"):
        build(path, audit="strict", broken=instead(as_they_lie))


@pytest.mark.parametrize("config", [DEBERTA, ROBERTA], ids=["deberta", "roberta"])
def test_encoders_may_depend_on_left_padding(tmp_path, build, config):
    """Encoders pool at the first position, which left padding fills."""
    path = save_model(tmp_path / "rm", config, cross_encoder=True)
    build(path, audit="strict")
    assert warnings(build) == []
    assert remark(build).startswith("with padding on the left its scores differ by up to ")
    assert ", which is harmless: texts are padded on the right; " in remark(build)


def test_heads_without_information(tmp_path, build):
    path = save_model(tmp_path / "rm", LLAMA)

    def filled(value):
        def broken(module):
            module.model.score.weight.data.fill_(value)
            return module

        return broken

    build(path, audit="report", broken=filled(float("nan")))
    assert warnings(build) == ["18 of its 18 scores are not finite"] and len(build.notes) == 1
    build(path, audit="report", broken=halves)
    assert warnings(build) == ["9 of its 18 scores are not finite"]
    build(path, audit="report", broken=filled(0.0))
    assert warnings(build) == ["its scores of 18 different texts are all 0: it gives no training signal"]
    for value in (float("nan"), 0.0):
        with pytest.raises(UserError, match="reward.audit=strict"):
            build(path, audit="strict", broken=filled(value))


def test_plausibility_is_reported(tmp_path, build):
    """The model counts tokens (bytes): every response beats the empty one, and longer beat shorter ones."""
    build(save_model(tmp_path / "rm", LLAMA), audit="report", broken=length)
    sizes = [len(response.encode()) for _, response in DIALOGUES]
    longer = sum(a > b for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True))
    assert 0 < longer < 6
    assert (
        f"a fitting response scores above an empty one in 6 of 6 and above an unrelated one in {longer} of 6 "
        "dialogues" in remark(build)
    )


def test_an_equal_score_is_no_win():
    """The scores are of 3 fitting, 3 empty and 3 unrelated responses: only 1 > 0 and 2 > 1 are wins."""
    findings = Findings()
    findings.remark_plausibility(torch.tensor([2.0, 1.0, 3.0, 2.0, 0.0, 3.0, 1.0, 1.0, 4.0]))
    assert findings.remarks == [
        "a fitting response scores above an empty one in 1 of 3 and above an unrelated one in 1 of 3 "
        "dialogues"
    ]


def test_all_ranks_stop_if_one_found_a_failure(tmp_path, build):
    path = save_model(tmp_path / "rm", LLAMA)
    with pytest.raises(UserError, match="the audit failed on another rank .reward.audit=strict"):
        build(path, audit="strict", ranks=lambda n: max(n, 1))
    asked = []
    build(path, audit="report", ranks=lambda n: asked.append(n) or n)
    # the same collectives on all ranks, whatever a rank finds
    assert asked == [1] * (2 + len(DIALOGUES)) + [0]
    asked.clear()
    build(path, audit="report", broken=neighbours, ranks=lambda n: asked.append(n) or n)
    assert asked == [1] * (2 + len(DIALOGUES)) + [1]


def test_the_audit_respects_the_budget_and_the_models_positions(tmp_path, build):
    path = save_model(tmp_path / "rm", GPT2)  # the model has 48 positions
    build(path, audit="strict", score_tokens=100, append_eos=False)
    assert all(rows * width <= 100 and width <= 48 for rows, width in build.placed.batches)
    assert warnings(build) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounding_is_no_failure(tmp_path, build, dtype):
    wide = LlamaConfig(**TINY | dict(hidden_size=64, num_hidden_layers=6, initializer_range=0.2))
    build(save_model(tmp_path / "rm", wide), audit="strict", dtype=dtype)
    assert warnings(build) == []
    build(str(tmp_path / "rm"), audit="report", dtype=dtype, broken=neighbours)
    assert len(warnings(build)) >= 1


def test_the_probes(tokenizer):
    pairs = probes(tokenizer)
    (rows, fitting), (_, empty), (again, unrelated) = (
        zip(*pairs[i : i + len(DIALOGUES)], strict=True) for i in range(0, len(pairs), len(DIALOGUES))
    )
    roles = [[message["role"] for message in row["messages"]] for row in rows]
    assert all(chat == (["user", "assistant"] * 9)[: len(chat)] and len(chat) % 2 for chat in roles)
    assert {len(chat) for chat in roles} == {1, 3} and len(set(fitting)) == len(rows) and rows == again
    assert any(not text.isascii() for text in fitting)
    assert unrelated == (*fitting[1:], fitting[0]) and set(empty) == {""}
    assert rows[2]["prompt_text"].startswith("I have two apples.\nNice!")
    tokenizer.hf.chat_template = CHAT_TEMPLATE
    # rendered like the actor's prompts
    assert probes(tokenizer)[0][0]["prompt_text"] == "<user>What is the capital of France?<eos><assistant>"
