"""Tests the comparison of models: responses, scores, and the same result on any number of ranks."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppo_ds.config.schema import Config
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.config.types import replace
from ppo_ds.errors import RunError, UserError
from ppo_ds.models import tiny
from ppo_ds.models.policy import load_policy
from ppo_ds.tools.comparison import table
from ppo_ds.tools.evaluate import Comparison, evaluate
from ppo_ds.tools.model_argument import NamedModel
from ppo_ds.tools.pairwise_judge import PairwiseJudge
from tests.config.commands import compose

PROMPTS = ["a", "bca", "ab", "cc", "ba"]
LIMIT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates prompts and two models whose greedy responses differ."""
    folder = tmp_path_factory.mktemp("evaluate")
    tokenizer = tiny.character_tokenizer("abc")
    for seed, name in enumerate(("base", "tuned")):
        torch.manual_seed(seed)
        model = tiny.tiny_llama(tokenizer, hidden_size=16, layers=1, heads=2, max_tokens=32)
        with torch.no_grad():
            model.lm_head.weight.mul_(30.0)  # far from ties
        tiny.save(model, tokenizer, folder / name)
    rows = [{"prompt": prompt, "likes": "abc"[i % 3]} for i, prompt in enumerate(PROMPTS)]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(
        "def score(prompts, responses, rows):\n"
        "    return [float(response.count(row['likes'])) for response, row in zip(responses, rows)]\n"
    )
    return folder


def config_of(folder: Path, *overrides: str) -> Config:
    return compose(
        f"actor.model.path={folder}/tuned", "actor.model.dtype=fp32", f"data.path={folder}/held.jsonl",
        f"data.eval_path={folder}/held.jsonl", "reward=function", f"reward.path={folder}/score.py:score",
        "rollout.prompts_per_step=2", f"sampling.max_new_tokens={LIMIT}", "run.steps=1",
        "sampling.temperature=3",
        *overrides,
    )  # fmt: skip


def compared(folder: Path, config: Config, world, **options: Any) -> Comparison:
    rewards = {
        "reward": config.reward,
        "judge": {"_target_": "ppo_ds.rewards.rules.LengthReward", "longest": 2},
    }
    models = [named(name, folder / name, str(config.actor.model.path)) for name in ("base", "tuned")]
    return evaluate(config, world, models, rewards, **options)


def named(name: str, path: Path, tokenizer: str) -> NamedModel:
    return NamedModel(name, str(path), f"evaluation.models.{name}", tokenizer)


def by_hand(path: Path, prompt: str) -> tuple[str, int]:
    """Returns the greedy response as text, and its number of tokens."""
    made = greedy_ids(path, prompt)
    return tiny.character_tokenizer("abc").decode(made), len(made)


def greedy_ids(path: Path, prompt: str) -> list[int]:
    """Returns the tokens of the greedy response, with one plain forward per token."""
    tokenizer = tiny.character_tokenizer("abc")
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = tokenizer.encode_many([prompt], special_tokens=True)[0]
    made: list[int] = []
    while len(made) < LIMIT and (not made or made[-1] != tokenizer.stop_ids[0]):
        with torch.no_grad():
            made.append(int(model(torch.tensor([ids + made])).logits[0, -1].argmax()))
    return made


def test_responses_and_scores_are_those_computed_by_hand(folder: Path, world) -> None:
    found = compared(folder, config_of(folder), world)
    assert [row["prompt"] for row in found.rows] == PROMPTS
    different = 0
    for i, row in enumerate(found.rows):
        for name in ("base", "tuned"):
            text, tokens = by_hand(folder / name, PROMPTS[i])
            response = row["responses"][name]
            assert (response["response"], response["tokens"]) == (text, tokens)
            assert response["scores"]["reward"] == text.count("abc"[i % 3])
        different += row["responses"]["base"]["response"] != row["responses"]["tuned"]["response"]
    assert different >= 3
    scores = [row["responses"]["tuned"]["scores"]["reward"] for row in found.rows]
    mean = found.summary["rewards"]["reward"]["score"]["tuned"]["mean"]
    assert mean == pytest.approx(sum(scores) / len(PROMPTS)) and found.summary["prompts"] == len(PROMPTS)
    assert set(found.summary["rewards"]["judge"]["win_rate"]) == {"tuned"}


def test_the_number_of_ranks_and_the_backend_do_not_change_the_result(
    folder: Path, world, on_ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The ranks are threads. transformers replaces PreTrainedModel.tie_weights while it loads a model; two
    # threads that load at once could leave it without effect in all later tests of the process.
    lock = Lock()

    def load_alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return load_policy(*args, **kwargs)

    monkeypatch.setattr("ppo_ds.tools.loading.load_policy", load_alone)
    config = config_of(folder)  # not in a thread, since Hydra has one process-wide state
    alone = compared(folder, config, world)
    for found in on_ranks(2, lambda rank: compared(folder, config, rank)):
        assert (found.summary, found.rows) == (alone.summary, alone.rows)
    assert compared(folder, config_of(folder, "rollout.backend=hf"), world).rows == alone.rows
    assert compared(folder, config_of(folder, "eval.max_prompts=3"), world).rows == alone.rows[:3]


def test_a_model_with_another_vocabulary_is_refused(folder: Path, world, tmp_path: Path) -> None:
    tokenizer = tiny.character_tokenizer("a")
    tiny.save(
        tiny.tiny_llama(tokenizer, hidden_size=8, layers=1, heads=2, max_tokens=32), tokenizer, tmp_path / "x"
    )
    config = config_of(folder)
    with pytest.raises(UserError, match="^evaluation.models.other=.*the actor's tokenizer has ids up to 5"):
        evaluate(
            config, world, [named("other", tmp_path / "x", str(folder / "tuned"))], {"reward": config.reward}
        )


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        ({"path": "nofile.py:f"}, "eval.rewards.x.path=nofile.py:f: no such file"),
        (
            {"path": "wrong.py:text"},
            "eval.rewards.x.path=.* returned 'x' .str.; it must return a list of 2 floats",
        ),
        (
            {"path": "wrong.py:raises"},
            "eval.rewards.x.path=.* raised KeyError: 'gone' at .*wrong.py:5, in a call",
        ),
        ({"_target_": "ppo_ds.rewards.rules.LengthReward"}, "eval.rewards.x.longest"),
    ],
    ids=["missing", "text", "raises", "incomplete"],
)
def test_wrong_rewards_are_refused_before_a_model_is_loaded(
    folder: Path, world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: dict[str, str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ppo_ds.tools.loading.load_policy", lambda *_, **__: pytest.fail("loaded a model"))
    (tmp_path / "wrong.py").write_text(
        "def text(prompts, responses, rows):\n    return 'x'\n\n"
        "def raises(prompts, responses, rows):\n    return [row['gone'] for row in rows]\n"
    )
    config = config_of(folder)
    models = [named(name, folder / name, str(folder / name)) for name in ("base", "tuned")]
    section = {"_target_": "ppo_ds.rewards.function.FunctionReward"} | reward
    with pytest.raises(UserError, match=line):
        evaluate(config, world, models, {"reward": config.reward, "x": section})


def test_lines_of_rewards_are_printed_once_for_several_tokenizers(folder: Path, world) -> None:
    config = config_of(folder)
    models = [named(name, folder / name, str(folder / name)) for name in ("base", "tuned")]
    lines: list[str] = []
    evaluate(config, world, models, {"reward": config.reward}, note=lines.append)
    assert len(lines) == len(set(lines))


def test_a_template_error_names_the_model(folder: Path, world, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    config = config_of(folder, f"data.path={tmp_path}/chats.jsonl", f"data.eval_path={tmp_path}/chats.jsonl")
    models = [named(name, folder / name, str(folder / name)) for name in ("base", "tuned")]
    with pytest.raises(UserError, match=r"no chat template.* \(with the tokenizer of base\)$"):
        evaluate(config, world, models, {"reward": config.reward})


# -- several responses, the KL, other tokenizers ----------------------------------------------------------


def probabilities(path: Path, ids: list[int], temperature: float) -> Tensor:
    """Returns the distribution of the next token, by one plain forward."""
    with torch.no_grad():
        logits = plain_model(path)(torch.tensor([ids])).logits[0, -1]
    return (logits.double() / temperature).softmax(-1)


@cache
def plain_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path)


def exact_kl(folder: Path, ids: list[int], stop: int, temperature: float, left: int) -> float:
    """Computes KL(tuned || base) of responses of at most ``left`` tokens by enumerating all of them.

    It is the KL of the next token, and the expected KL of the rest.
    """
    tuned, base = (probabilities(folder / name, ids, temperature) for name in ("tuned", "base"))
    total = float((tuned * (tuned / base).log()).sum())
    for token, chance in enumerate(tuned.tolist()):
        if left > 1 and token != stop:
            total += chance * exact_kl(folder, [*ids, token], stop, temperature, left - 1)
    return total


def test_the_kl_is_that_of_all_responses(folder: Path, world) -> None:
    """Compares the estimate from 256 sampled responses to each of 2 prompts with the enumerated KL."""
    config = config_of(folder, "sampling.max_new_tokens=3", "eval.max_prompts=2")
    found = compared(folder, config, world, samples=256)
    tokenizer = tiny.character_tokenizer("abc")
    exact = [
        exact_kl(folder, ids, tokenizer.stop_ids[0], 3.0, left=3)
        for ids in tokenizer.encode_many(PROMPTS[:2], special_tokens=True)
    ]
    ratios = [row["responses"]["tuned"]["log_ratio"] for row in found.rows]
    error = 4 * torch.tensor(ratios).std().item() / len(ratios) ** 0.5
    kl = found.summary["kl"]
    assert kl["name"] == "KL" and "Unbiased" in kl["estimator"] and list(kl["models"]) == ["tuned"]
    assert (
        kl["models"]["tuned"]["mean"] == pytest.approx(sum(exact) / 2, abs=error) and error < sum(exact) / 4
    )
    tokens = sum(row["responses"]["tuned"]["tokens"] for row in found.rows)
    assert kl["models"]["tuned"]["per_token"] == pytest.approx(sum(ratios) / tokens)


def test_log_ratios_are_those_of_plain_forwards(folder: Path, world) -> None:
    config = config_of(folder)
    found = compared(folder, config, world)
    tokenizer = tiny.character_tokenizer("abc")
    for prompt, row in zip(PROMPTS, found.rows, strict=True):
        ids = tokenizer.encode_many([prompt], special_tokens=True)[0]
        response = row["responses"]["tuned"]
        ratio = 0.0
        for token in greedy_ids(folder / "tuned", prompt):
            tuned, base = (float(probabilities(folder / name, ids, 3.0)[token]) for name in ("tuned", "base"))
            ratio += math.log(tuned / base)
            ids = [*ids, token]
        assert response["log_ratio"] == pytest.approx(ratio, abs=1e-4)
        assert "log_ratio" not in row["responses"]["base"]
    assert found.summary["kl"]["name"] == "log ratio" and "no estimate" in found.summary["kl"]["estimator"]


def test_the_budget_of_log_probs_fits_the_longest_prompt_of_all_models(
    folder: Path, world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, longest = tiny.character_tokenizer("abc"), []
    tokenizer.hf.chat_template = "ccc{{ messages[0]['content'] }}"
    tiny.save(AutoModelForCausalLM.from_pretrained(folder / "base"), tokenizer, tmp_path / "chat")
    monkeypatch.setattr(
        "ppo_ds.tools.responses.largest_scoring", lambda *arguments: longest.append(arguments[2]) or 999
    )
    config = config_of(folder)
    models = [named("base", folder / "base", str(folder / "base"))]
    models.append(named("chat", tmp_path / "chat", str(tmp_path / "chat")))
    evaluate(config, world, models, {"reward": config.reward})
    assert longest == [len("ccc") + max(map(len, PROMPTS)) + LIMIT] * 2


def test_a_model_compared_with_itself_ties(folder: Path, world) -> None:
    config = config_of(folder, "sampling.top_k=2")
    models = [named(name, folder / "tuned", str(folder / "tuned")) for name in ("one", "two")]
    found = evaluate(config, world, models, {"reward": config.reward}, samples=3)
    summary = found.summary
    assert summary["rewards"]["reward"]["win_rate"]["two"]["one"]["mean"] == 0.5
    assert summary["kl"]["models"]["two"]["mean"] == 0.0
    assert summary["kl"]["name"] == "log ratio"  # top_k
    assert [(row["number"], row["sample"]) for row in found.rows] == [
        (i, j) for i in range(5) for j in range(3)
    ]
    assert len({row["responses"]["one"]["response"] for row in found.rows}) > 3


def test_pass_at_k_counts_responses_above_the_bound(folder: Path, world) -> None:
    found = compared(folder, config_of(folder, "eval.correct_above=0.5"), world, samples=4)
    assert list(found.summary["pass_at_k"]) == ["reward"]
    rates = found.summary["pass_at_k"]["reward"]["models"]["base"]
    correct = [0] * len(PROMPTS)
    for row in found.rows:
        correct[row["number"]] += row["responses"]["base"]["scores"]["reward"] > 0.5
    assert rates["1"]["mean"] == pytest.approx(sum(correct) / 20)
    pairs = [1 - math.comb(4 - c, 2) / math.comb(4, 2) for c in correct]
    assert rates["2"]["mean"] == pytest.approx(sum(pairs) / 5) and 0 < rates["1"]["mean"] < rates["4"]["mean"]
    assert "pass_at_k" not in compared(folder, config_of(folder), world).summary


def test_scores_by_the_values_of_a_column(folder: Path, world) -> None:
    found = compared(folder, config_of(folder, "eval.by=likes"), world, samples=2)
    assert list(found.summary["by"]["values"]) == ["a", "b", "c"] and found.summary["by"]["column"] == "likes"
    rows = [row for row in found.rows if row["columns"]["likes"] == "b"]
    by_hand = sum(row["responses"]["tuned"]["scores"]["reward"] for row in rows) / len(rows)
    value = found.summary["by"]["values"]["b"]
    assert value["prompts"] == 2 and value["score"]["reward"]["tuned"]["mean"] == pytest.approx(by_hand)
    assert value["score"]["reward"]["tuned"]["low"] <= by_hand <= value["score"]["reward"]["tuned"]["high"]
    lines = [line.split() for line in table(found.summary).splitlines()]
    assert ["likes", "prompts", "base", "(reward)", "tuned", "(reward)"] in lines
    assert any(line[:2] == ["b", "2"] for line in lines)


def test_a_column_by_which_nothing_can_be_grouped_is_refused(folder: Path, world, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.by=like: no row of .* the columns are prompt, likes"):
        compared(folder, config_of(folder, "eval.by=like"), world)
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"prompt": "a", "likes": str(i)}) + "\n" for i in range(51)))
    config = config_of(folder, "eval.by=likes", f"data.eval_path={many}", f"data.path={many}")
    for data in (config.data, replace(config.data, eval_path=None)):  # the command needs only one of the keys
        with pytest.raises(UserError, match=r"likes: has 51 values in .*; choose a column with at most 50"):
            compared(folder, replace(config, data=data), world)
    many.write_text(json.dumps({"prompt": "a", "likes": [1]}) + "\n")
    with pytest.raises(UserError, match=r"likes: has \[1\] in .*; choose a column of numbers or short texts"):
        compared(folder, config_of(folder, "eval.by=likes", f"data.eval_path={many}"), world)


def test_an_exception_of_the_reward_is_one_line(folder: Path, world, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "def score(prompts, responses, rows):\n"
        "    return [row['number'] if len(prompts) > 3 else 0.0 for row in rows]\n"
    )
    wanted = ["reward=function", f"reward.path={tmp_path}/late.py:score"]
    with pytest.raises(RunError, match=r"^KeyError: 'number', .*reward\.path=.*late\.py:score"):
        compared(folder, config_of(folder, *wanted), world)


def test_a_judge_compares_with_the_first_model(folder: Path, world, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def prefer(prompts, a, b, rows):\n"
        "    score = lambda text, row: text.count(row['likes'])\n"
        "    pairs = zip(a, b, rows)\n"
        "    gains = [score(x, r) - score(y, r) for x, y, r in pairs]\n"
        "    return [0.5 + 0.5 * ((gain > 0) - (gain < 0)) for gain in gains]\n"
    )
    judge = PairwiseJudge(f"{tmp_path}/judge.py:prefer")
    found = compared(folder, config_of(folder), world, judge=judge)
    by_reward = found.summary["rewards"]["reward"]["win_rate"]["tuned"]["base"]
    assert found.summary["judge"]["first"] == "base"
    assert found.summary["judge"]["models"] == {
        "tuned": {"win_rate": by_reward, "position_bias": 0.0, "disagreement": 0.0}
    }


def test_each_model_reads_with_its_own_tokenizer(folder: Path, world, tmp_path: Path) -> None:
    """The other tokenizer has the same characters in another order, so the same text has other ids."""
    tokenizer = tiny.character_tokenizer("cba")
    model = tiny.tiny_llama(tokenizer, hidden_size=16, layers=1, heads=2, max_tokens=32)
    state = AutoModelForCausalLM.from_pretrained(folder / "tuned").state_dict()
    order = [tiny.character_tokenizer("abc").hf.get_vocab()[token] for token in vocabulary(tokenizer)]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][order]
    model.load_state_dict(state)
    tiny.save(model, tokenizer, tmp_path / "other")
    config = config_of(folder)
    models = [
        named("tuned", folder / "tuned", str(folder / "tuned")),
        named("other", tmp_path / "other", str(tmp_path / "other")),
    ]
    found = evaluate(config, world, models, {"reward": config.reward})
    for row in found.rows:
        one, two = (row["responses"][name] for name in ("tuned", "other"))
        assert (one["response"], one["scores"]) == (two["response"], two["scores"])
    assert "kl" not in found.summary
    assert found.summary["remarks"] == ["no KL of other to tuned: it needs models with the same vocabulary"]
    drop = config_of(folder, "data.max_prompt_tokens=2", "data.long_prompts=drop")
    with pytest.raises(UserError, match="^data.long_prompts=drop: the tokenizers of tuned and other would"):
        evaluate(drop, world, models, {"reward": config.reward})


def vocabulary(tokenizer: Any) -> list[str]:
    ids = tokenizer.hf.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def test_an_adapter_is_merged_as_in_an_exported_model(folder: Path, tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = get_peft_model(lm, LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", use_rslora=True))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.merge_and_unload().state_dict()
    section = ModelConfig(path=str(folder / "base"), dtype="fp32")
    found = load_policy(section, temperature=1.0, key="x", adapter=tmp_path / "adapter").lm.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    changed = [
        name for name, weight in expected.items() if not torch.equal(weight, plain_state(folder)[name])
    ]
    assert len(changed) == 7  # q, k, v, o, gate, up, down


def plain_state(folder: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "base").state_dict()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"use_dora": True}, "its adapter is LoRA with use_dora; merge it with peft's merge_and_unload"),
        ({"bias": "all"}, "its adapter is LoRA with bias; merge it"),
        ({"target_modules": ["nothing"]}, "its adapter does not fit"),
        ({"layers_to_transform": [0], "r": 3}, "its adapter does not fit"),
        ({"target_modules": ["q_proj"]}, "its adapter does not fit .* counterpart"),
        ({"peft_type": "NONSENSE"}, "its adapter cannot be read"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    lm = AutoModelForCausalLM.from_pretrained(folder / "base")
    get_peft_model(lm, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    section = ModelConfig(path=str(folder / "base"), dtype="fp32")
    with pytest.raises(UserError, match=f"^x={tmp_path}: .*{line}"):
        load_policy(section, temperature=1.0, key="x", adapter=tmp_path)
