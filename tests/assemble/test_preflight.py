"""Tests the checks of models and rewards on model folders without usable weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, LlamaConfig

from ppo_ds.assemble.data import read_inputs
from ppo_ds.assemble.preflight import check_inputs, preflight
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.rollout import vllm_support
from tests.config.commands import compose

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no "
    "system here') }}{% endif %}{{ m.content }}{% endfor %}"
)
CHATTY = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOKENS = 3 + 26  # pad, end, unknown and the letters
# two ranks divide the tokens of a row; a dry run may have one
DIVIDED = ("reward=length", "reward.longest=3", "memory.sequence_parallel=2", "run.dry_run=true")
ROWS = [{"prompt": "ab", "answer": 1}, {"prompt": "cd", "answer": "2"}]


@pytest.fixture
def folder(tmp_path):
    """Makes a model folder with a config.json, a tokenizer and one-element weights with the given names."""

    def make(name: str, template: str | None = None, weights: tuple[str, ...] = (), **config: Any) -> str:
        tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz")
        tokenizer.hf.chat_template = template
        tokenizer.save(tmp_path / name)
        size = dict(
            vocab_size=TOKENS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
        LlamaConfig(**size | config).save_pretrained(tmp_path / name)
        if weights:
            save_file({weight: torch.zeros(1) for weight in weights}, tmp_path / name / "model.safetensors")
        return str(tmp_path / name)

    return make


def scorer(folder, name="rm", **changes):
    options = dict(
        num_labels=1,
        architectures=["LlamaForSequenceClassification"],
        weights=("model.embed_tokens.weight", "score.weight"),
    )
    return folder(name, **options | changes)


@pytest.fixture
def check(tmp_path, folder):
    """Checks the inputs of a run with these rows; returns the errors, with paths relative to the folder."""

    def run(*arguments: str, rows=ROWS, actor=None) -> list[str]:
        (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        actor = actor or folder("actor")
        config = compose(
            f"actor.model.path={actor}",
            f"data.path={tmp_path}/x.jsonl",
            "rollout.prompts_per_step=2",
            "sampling.max_new_tokens=4",
            "run.steps=1",
            *arguments,
        )
        try:
            preflight(config, read_inputs(config, SimpleNamespace(rank=0, size=1)), on_gpu=False)
        except UserError as error:
            return [line.replace(f"{tmp_path}/", "") for line in error.problems]
        return []

    return run


def test_valid_models_pass(check, folder):
    path = scorer(folder)
    assert check("reward=model", f"reward.model.path={path}") == []
    assert check("reward=model", f"reward.model.path={path}", "reward.template=pair") == []
    assert check("reward=numeric") == []


def test_a_language_model_is_refused_as_reward_model(check, folder):
    causal = folder(
        "lm", architectures=["LlamaForCausalLM"], weights=("model.embed_tokens.weight", "lm_head.weight")
    )
    assert check("reward=model", f"reward.model.path={causal}") == [
        (
            "reward.model.path=lm: has no trained score head (score.weight not in its "
            "files): give a sequence classifier trained to score"
        )
    ]


def test_weights_in_several_files(check, folder, tmp_path):
    path = Path(scorer(folder, weights=()))
    for names, fine in (
        (("score.weight",), True),
        (("wrapped.score.weight",), True),
        (("lm_head.weight",), False),
    ):
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {name: "model-1.safetensors" for name in names}})
        )
        assert (check("reward=model", f"reward.model.path={path}") == []) is fine


def test_weights_that_are_not_local_are_checked_when_they_are_loaded(check, folder):
    assert check("reward=model", f"reward.model.path={scorer(folder, weights=())}") == []


def test_a_reward_model_with_two_labels(check, folder):
    assert check("reward=model", f"reward.model.path={scorer(folder, num_labels=2)}") == [
        "reward.model.path=rm: has 2 labels; a score needs a sequence classifier with one (num_labels=1)"
    ]


def test_ids_beyond_an_embedding(check, folder):
    small = folder("small", vocab_size=TOKENS - 1)
    beyond = (
        f"the actor's tokenizer has ids up to {TOKENS - 1}, but this model's embedding "
        f"has only {TOKENS - 1} rows; use a model and a tokenizer that belong together"
    )
    assert check("reward=length", "reward.longest=3", actor=small) == [f"actor.model.path=small: {beyond}"]
    assert check("reward=length", "reward.longest=3", f"reference.model.path={small}") == [
        f"reference.model.path=small: {beyond}"
    ]
    assert check("reward=model", f"reward.model.path={scorer(folder, vocab_size=TOKENS - 1)}") == [
        (
            f"reward.model.path=rm: its tokenizer has ids up to {TOKENS - 1}, its embedding "
            f"only {TOKENS - 1} rows"
        )
    ]


def test_rows_beyond_the_positions(check, folder):
    """The longest prompt has two tokens."""
    short = folder("short", max_position_embeddings=5)
    line = (
        "short: has 5 positions; the longest prompt and sampling.max_new_tokens together (or a text of "
        "data.ptx_path) need 6: lower data.max_prompt_tokens, sampling.max_new_tokens or data.ptx_max_tokens"
    )
    for key, actor in (("actor", short), ("reference", None), ("critic", None)):
        path = () if actor else (f"{key}.model.path={short}",)
        path += ("critic.init=path",) if key == "critic" else ()
        assert check("reward=length", "reward.longest=3", *path, actor=actor) == [f"{key}.model.path={line}"]
    assert check("reward=length", "reward.longest=3", "sampling.max_new_tokens=3", actor=short) == []


def test_a_teacher_that_cannot_read_the_responses(check, folder, tmp_path):
    """The longest row has six tokens. Ranks do not divide the rows of a teacher, so any heads will do."""
    arguments = ("reward=teacher", "algo=distill", f"reward.model.path={tmp_path}/teacher")
    folder("teacher", max_position_embeddings=6, num_attention_heads=3, hidden_size=24)
    assert check(*arguments) == check(*arguments, *DIVIDED[2:]) == []
    folder("teacher", max_position_embeddings=5)
    (line,) = check(*arguments)
    assert line.startswith("reward.model.path=teacher: has 5 positions")
    folder("teacher", vocab_size=TOKENS - 1)
    (line,) = check(*arguments)
    assert line.startswith("reward.model.path=teacher: the actor's tokenizer has ids up to")
    folder("teacher")
    character_tokenizer("abcdefghijklmnopqrstuvwxzy").save(tmp_path / "teacher")
    assert check(*arguments) == [
        "reward.model.path=teacher: its tokenizer differs from the policy's, actor, in 2 tokens such as 'y'; "
        "a teacher reads the token ids of the policy, so choose a model of the same family"
    ]


@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (4, 1)])
def test_heads_that_ranks_cannot_divide(check, folder, heads, groups):
    odd = folder("odd", num_attention_heads=heads, num_key_value_heads=groups, hidden_size=24)
    assert check("reward=length", "reward.longest=3", actor=odd) == []
    assert check(*DIVIDED, actor=odd) == [
        f"memory.sequence_parallel=2: its {heads} attention heads and {groups} key-value heads are not "
        "divisible by it (actor.model.path=odd)"
    ]
    assert check(*DIVIDED) == []


@pytest.mark.parametrize(
    ("given", "own", "refused"), [("null", 0.001, True), ("0.1", 0, True), ("0", 1, False)]
)
def test_the_load_balancing_loss_needs_whole_rows(check, folder, given, own, refused):
    experts = folder("experts", router_aux_loss_coef=own)
    assert check(*DIVIDED, f"algo.aux_coef={given}", actor=experts) == refused * [
        f"algo.aux_coef={given}: the load-balancing loss needs whole rows; set algo.aux_coef=0 or "
        "memory.sequence_parallel=1"
    ]


def test_an_end_token_beyond_the_embedding(check, folder):
    """The model has a generation_config.json that was copied from another model."""
    actor = folder("odd")
    (Path(actor) / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 151645]}))
    (line,) = check("reward=length", "reward.longest=3", actor=actor)
    assert line.startswith(
        "actor.model.path=odd: the actor's tokenizer has ids up to 151645, but this "
        f"model's embedding has only {TOKENS} rows"
    )


CHATS = [
    {"messages": [{"role": "user", "content": "a"}]},
    {"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]},
]


def test_the_reward_models_own_chat_template_is_tried_on_each_order_of_roles(check, folder):
    actor = folder("chatty", template=CHATTY)
    path = scorer(folder, template=TEMPLATE)
    assert check("reward=model", f"reward.model.path={path}", rows=CHATS[:1] * 2, actor=actor) == []
    assert check("reward=model", f"reward.model.path={path}", rows=CHATS, actor=actor) == [
        "x.jsonl:2: reward.template=chat: the reward model's chat template refuses a chat with the roles "
        "system, user, assistant (TemplateError: no system here); set "
        "reward.template=pair or reward.template=concat"
    ]
    assert (
        check("reward=model", f"reward.model.path={path}", "reward.template=concat", rows=CHATS, actor=actor)
        == []
    )
    broken = scorer(folder, "broken", template="{% for %}")
    (line,) = check("reward=model", f"reward.model.path={broken}", rows=CHATS, actor=actor)
    assert line.startswith(
        "x.jsonl:1: reward.template=chat: the reward model's chat template is not Jinja (line 1: "
    )


def test_held_out_rows_are_checked_too(check, folder, tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps(CHATS[1]))
    actor, path = folder("chatty", template=CHATTY), scorer(folder, template=TEMPLATE)
    (line,) = check(
        "reward=model",
        f"reward.model.path={path}",
        f"data.eval_path={tmp_path}/held.jsonl",
        rows=CHATS[:1] * 2,
        actor=actor,
    )
    assert line.startswith("held.jsonl:1: reward.template=chat: ")


@pytest.mark.parametrize(
    ("reward", "rows", "lines"),
    [
        (
            "numeric",
            [*ROWS, {"prompt": "e"}],
            [
                (
                    "x.jsonl:3: reward.column=answer: no such column in the rows; they have "
                    "prompt; set reward.column"
                )
            ],
        ),
        (
            "numeric",
            [
                {"prompt": "e", "answer": "many"},
                *ROWS,
                {"prompt": "e", "answer": None},
                {"prompt": "e", "answer": float("nan")},
            ],
            [
                (
                    "x.jsonl:1: reward.column=answer: the reference 'many' is not a single finite "
                    "number; correct it, or name another column"
                ),
                (
                    "x.jsonl:4: reward.column=answer: the reference is empty; give each row one, "
                    "or set reward.column (and 1 more rows)"
                ),
            ],
        ),
        (
            "exact_match",
            [*ROWS, {"prompt": "e", "answer": " "}, {"prompt": "e", "answer": True}],
            [
                (
                    "x.jsonl:3: reward.column=answer: the reference is empty; give each row one, "
                    "or set reward.column"
                ),
                (
                    "x.jsonl:4: reward.column=answer: the reference 'True' is neither a text nor a "
                    "number; correct it, or name another column"
                ),
            ],
        ),
    ],
)
def test_rows_without_a_reference_are_errors(check, reward, rows, lines):
    assert check(f"reward={reward}", rows=rows) == lines


PARTS = ["reward=weighted", "reward@reward.parts.a.reward=numeric", "reward@reward.parts.b.reward=model"]


def test_the_parts_of_a_mixture(check, folder):
    """A mixture that contains a model is checked part by part, any other mixture as a whole."""
    model = f"reward.parts.b.reward.model.path={scorer(folder, num_labels=3)}"
    assert check(*PARTS, model, rows=[{"prompt": "a", "answer": "x"}] * 2)[0].startswith(
        "x.jsonl:1: reward.parts.a.reward.column=answer: the reference 'x' is not a single finite number"
    )
    assert check(*PARTS, model) == [
        (
            "reward.parts.b.reward.model.path=rm: has 3 labels; a score needs a sequence "
            "classifier with one (num_labels=1)"
        )
    ]
    assert check(*PARTS[:2], rows=[{"prompt": "a"}] * 2)[0].startswith(
        "x.jsonl:1: reward.parts.a.reward.column=answer: no such column in the rows"
    )


def test_a_missing_function_is_an_error(check, folder, tmp_path):
    (tmp_path / "no.py").touch()
    function = ["reward@reward.parts.a.reward=function", f"reward.parts.a.reward.path={tmp_path}/no.py:score"]
    model = f"reward.parts.b.reward.model.path={scorer(folder)}"
    assert check("reward=weighted", *function, PARTS[2], model) == [
        "reward.parts.a.reward.path=no.py:score: no.py has no score; its functions are: none"
    ]


def test_a_function_is_imported_once(check, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys\nsys.times_seen = getattr(sys, 'times_seen', 0) + 1\ndef score(p, "
        "r, rows): return [0.0] * len(p)"
    )
    for _ in range(2):
        assert check("reward=function", f"reward.path={tmp_path}/mine.py:score") == []
    assert sys.times_seen == 1


@pytest.mark.parametrize("nested", [False, True])
def test_functions_are_checked_although_data_and_models_are_still_to_be_prepared(nested, tmp_path):
    """The record of an earlier run is moved only after the reward functions are checked."""
    path = f"{tmp_path}/no.py:score"
    (tmp_path / "no.py").touch()
    reward = ["reward=function", f"reward.path={path}"]
    if nested:
        part = "reward.parts.a.reward"
        reward = ["reward=weighted", f"reward@{part}=function", f"{part}.path={path}"]
    made = [
        "prepare._target_=ppo_ds.examples.sums.prepare",
        f"prepare.dir={tmp_path}/start",
        "prepare.seed=1",
    ]
    missing = [f"actor.model.path={tmp_path}/start", f"data.path={tmp_path}/start/x.jsonl", "run.steps=1"]
    config = compose(*reward, *made, *missing, "rollout.prompts_per_step=2", "sampling.max_new_tokens=4")
    with pytest.raises(UserError, match=r"path=.*no.py:score: .* has no score"):
        check_inputs(config, SimpleNamespace(rank=0, size=1), prepared=False)


def test_the_class_of_an_environment_is_checked_unless_prepare_creates_its_file(tmp_path):
    made = [
        "prepare._target_=ppo_ds.examples.sums.prepare",
        f"prepare.dir={tmp_path}/start",
        "prepare.seed=1",
    ]
    sizes = ["run.steps=1", "rollout.prompts_per_step=2", "sampling.max_new_tokens=4", "reward=numeric"]
    paths = [f"actor.model.path={tmp_path}/start", f"data.path={tmp_path}/start/x.jsonl"]

    def found(file: str) -> list[str]:
        game = ["rollout.environment.path=" + file, "rollout.environment.max_turns=2"]
        config = compose(*sizes, *paths, *made, *game)
        try:
            check_inputs(config, SimpleNamespace(rank=0, size=1), prepared=False)
        except UserError as error:
            return error.problems
        return []

    (line,) = found(f"{tmp_path}/no.py:Game")
    assert line.startswith("rollout.environment.path=") and "no such file" in line
    assert found(f"{tmp_path}/start/game.py:Game") == []


def test_remote_code_without_permission_is_refused(check):
    (line,) = check("reward=get_score", "reward.model.path=org/rm")
    assert line.startswith(
        "reward.model.trust_remote_code=false: get_score is Python code from the files "
        "of org/rm; read that code, then set"
    )


@pytest.mark.parametrize(
    ("stops", "fine"), [([], False), (["sampling.stop_token_ids=[]"], True), (["sampling.stop=[x]"], True)]
)
def test_a_tokenizer_without_an_end(check, folder, stops, fine):
    from ppo_ds.assemble.data import build_tokenizer, stop_ids

    actor = Path(folder("endless"))
    file = actor / "tokenizer_config.json"
    file.write_text(
        json.dumps(
            {name: value for name, value in json.loads(file.read_text()).items() if name != "eos_token"}
        )
    )
    config = compose(
        f"actor.model.path={actor}",
        "data.path=x",
        "rollout.prompts_per_step=2",
        "sampling.max_new_tokens=4",
        "run.steps=1",
        "reward=numeric",
        *stops,
    )
    if fine:
        assert stop_ids(config, build_tokenizer(config)) == ()
        return
    with pytest.raises(
        UserError,
        match=(
            "^actor.model.path=.*names an end token, so no response would end by itself; "
            "set sampling.stop_token_ids or"
        ),
    ):
        stop_ids(config, build_tokenizer(config))


def test_files_of_real_classifiers_have_their_heads(tmp_path):
    """Files that transformers writes pass the check, whatever a model family calls its head."""
    from transformers import BertConfig, DebertaV2Config, GPT2Config, RobertaConfig

    from ppo_ds.models.value import expect_reward_model

    small = dict(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=1,
    )
    families = [LlamaConfig(**small), GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2, num_labels=1)]
    families += [BertConfig(**small), RobertaConfig(**small), DebertaV2Config(**small)]
    for i, config in enumerate(families):
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / str(i))
        assert expect_reward_model(ModelConfig(path=str(tmp_path / str(i))))[:2] == (30, i < 2)


def test_what_vllm_cannot_decode_is_found_before_weights_are_read(check, folder, monkeypatch):
    """The model folders have no weights; vLLM is not installed."""
    fits = folder("fits", hidden_size=64)
    monkeypatch.setattr(vllm_support, "installed_version", lambda: None)
    (line,) = check("reward=numeric", "rollout.backend=vllm", actor=fits)
    assert line.startswith("rollout.backend=vllm: vLLM is not installed; ") and line.endswith("=auto")
    monkeypatch.setattr(vllm_support, "installed_version", lambda: "0.33.0")
    (line,) = check("reward=numeric", "rollout.backend=vllm", actor=fits)
    assert line.startswith("rollout.backend=vllm: vLLM 0.33.0 was not tested with this trainer; ")
    monkeypatch.setattr(vllm_support, "installed_version", lambda: "0.32.0")
    assert check("reward=numeric", "rollout.backend=vllm", actor=fits) == []
    assert check("reward=numeric", "rollout.backend=vllm", "rollout.vllm.sleep=2", actor=fits) == [
        "rollout.vllm.sleep=2: vLLM cannot sleep on a CPU; use auto or 0"
    ]
    (line,) = check("reward=numeric", "rollout.backend=vllm")
    assert line.startswith("rollout.backend=vllm: the model has attention heads of size 4; on a CPU vLLM ")
    assert line.endswith("use rollout.backend=auto (actor.model.path=actor)")
