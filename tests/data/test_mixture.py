"""Tests mixed data sets: shares, orders, ranks, resume, and the source of each row."""

from collections import Counter

import pytest
import torch

from ppo_ds.data.mixture import MixedSource, collect_user_errors
from ppo_ds.data.prompts import PromptSource, PromptStream, eval_batches
from ppo_ds.errors import UserError
from tests.data.conftest import options_of


@pytest.fixture
def part(jsonl, tokenizer):
    """Builds a data set "a" of n prompts "a0", "a1", ..."""

    def make(name, n, **options):
        rows = [{"prompt": f"{name}{i}"} for i in range(n)]
        return PromptSource(
            jsonl(*rows, name=f"{name}.jsonl"),
            **options_of(
                **{"tokenizer": tokenizer, "max_new_tokens": 9, "apply_chat_template": False, **options}
            ),
        )

    return make


@pytest.fixture
def mixed(part):
    def make(sizes, weights):
        return MixedSource([part(name, n) for name, n in zip("abc", sizes, strict=False)], weights)

    return make


def texts(prompts):
    return [row["prompt_text"] for row in prompts.metadata]


def take(stream, steps):
    return [texts(next(stream)) for _ in range(steps)]


def test_a_batch_of_several_sets(mixed):
    """The ids are "a" 66, "b" 67, and digits from "0" 17 on ("!", character 33, has id 2).

    "b" has more than ten prompts, and so "b10" has three tokens.
    """
    source = mixed([2, 11], [1, 1])
    batch = source.batch([12, 0, 2, 12])
    assert batch.ids.tolist() == [[67, 18, 17], [1, 66, 17], [1, 67, 17], [67, 18, 17]]
    assert batch.mask.tolist() == [[True] * 3, [False, True, True], [False, True, True], [True] * 3]
    assert texts(batch) == ["b10", "a0", "b0", "b10"] and (len(source), source.longest) == (13, 3)


def test_every_row_names_its_data_set(mixed):
    rows = mixed([2, 3], [1, 1]).batch([0, 1, 2, 4]).metadata
    assert [row["data_source"].rpartition("/")[2] for row in rows] == [
        "a.jsonl",
        "a.jsonl",
        "b.jsonl",
        "b.jsonl",
    ]


def test_rows_that_fail_a_check_are_named_in_each_set(mixed):
    source = mixed([2, 3], [1, 1])
    assert [(place.rpartition("/")[2], row["prompt_text"]) for place, row in source.examples()] == [
        ("a.jsonl:1", "a0"),
        ("b.jsonl:1", "b0"),
    ]

    def check(row):
        if row["prompt"] in ("a1", "b0", "b2"):
            raise UserError("no answer")

    with pytest.raises(UserError) as caught:
        source.check_rows(check)
    assert [line.rpartition("/")[2] for line in caught.value.problems] == [
        "a.jsonl:2: no answer",
        "b.jsonl:1: no answer (and 1 more rows)",
    ]


def test_each_step_has_the_shares(mixed):
    """With weights 5, 3 and 2 each step of ten has five, three and two prompts, whatever the sets' sizes."""
    stream = PromptStream(mixed([40, 4, 17], [0.5, 0.3, 0.2]), prompts_per_step=10, seed=1)
    assert all(Counter(text[0] for text in step) == {"a": 5, "b": 3, "c": 2} for step in take(stream, 20))


def test_shares_that_no_step_can_have_even_out(mixed):
    """With weights 2 and 1 and four prompts per step, "b" has 4n / 3 prompts after n steps, within one."""
    stream, seen = PromptStream(mixed([9, 9], [2, 1]), prompts_per_step=4), Counter()
    for n in range(1, 40):
        seen.update(text[0] for text in take(stream, 1)[0])
        assert abs(seen["b"] - 4 * n / 3) < 1


def test_each_set_is_repeated_in_passes_of_its_own(mixed):
    source = mixed([4, 6, 6], [2, 1, 1])
    seen = sum(take(PromptStream(source, prompts_per_step=8, seed=3), 12), [])
    a, b, c = ([text for text in seen if text[0] == name] for name in "abc")
    assert (len(a), len(b), len(c)) == (48, 24, 24)
    for texts_of, n in ((a, 4), (b, 6), (c, 6)):
        passes = [texts_of[i : i + n] for i in range(0, len(texts_of), n)]
        assert all(len(set(each)) == n for each in passes) and len(set(map(tuple, passes))) > 1
    assert [text[1:] for text in b] != [text[1:] for text in c]  # the sets have different orders
    assert seen != sum(take(PromptStream(source, prompts_per_step=8, seed=4), 12), [])


def test_no_pass_of_a_set_has_the_order_of_a_pass_of_another_set(mixed):
    stream = PromptStream(mixed([12, 12], [1, 1]), prompts_per_step=24, seed=3)
    orders = [
        tuple(text[1:] for text in step if text[0] == name) for step in take(stream, 4) for name in "ab"
    ]
    assert len(set(orders)) == 8 and all(len(set(order)) == 12 for order in orders)


def test_one_epoch_is_the_number_of_all_prompts(mixed):
    stream = PromptStream(mixed([9, 3], [1, 1]), prompts_per_step=4, shuffle=False)
    assert Counter(sum(take(stream, 3), []))["b0"] == 2 and stream.epoch == 1.0


def test_a_mixture_of_one_set_is_that_set(part):
    alone, mixture = part("a", 7), MixedSource([part("a", 7)], [0.3])
    options = {"prompts_per_step": 3, "seed": 5}
    assert take(PromptStream(alone, **options), 9) == take(PromptStream(mixture, **options), 9)


def test_the_description_of_a_mixture(part):
    sources = [part("a", 3, max_prompt_tokens=1), part("b", 4)]
    source = MixedSource(sources, [3, 1])
    assert source.shares == [0.75, 0.25]
    assert {name: count for name, count in source.report.items() if count} == {"rows": 7, "truncated": 3}
    assert source.path == f"75% {sources[0].path} + 25% {sources[1].path}"


def test_fewer_prompts_than_a_step(mixed):
    with pytest.raises(
        UserError, match=r"data.mix=50% .*a.jsonl \+ 50% .*b.jsonl: 5 prompts are fewer than one step takes"
    ):
        PromptStream(mixed([2, 3], [1, 1]), prompts_per_step=6)


def test_the_first_prompts_of_a_mixture_can_be_evaluated(mixed):
    ((batch, weights),) = eval_batches(mixed([2, 3], [1, 1]), rank=0, world_size=1, rows_per_batch=9)
    assert texts(batch) == ["a0", "a1", "b0", "b1", "b2"] and torch.equal(weights, torch.ones(5))


def test_problems_of_all_sets_are_reported_together(jsonl, tokenizer, part):
    def make(i, path, **options):
        return lambda: PromptSource(
            path, **options_of(tokenizer=tokenizer, max_new_tokens=9, key=f"data.mix[{i}].path", **options)
        )

    bad = jsonl({"prompt": "a"}, {"prompt": 5}, name="bad.jsonl")
    with pytest.raises(UserError) as caught:
        collect_user_errors(
            [
                make(0, "missing.jsonl"),
                make(1, part("a", 2).path),
                make(2, bad),
                make(3, part("b", 2).path, prompt_column="q"),
            ]
        )
    first, second, third = caught.value.problems
    assert first == "data.mix[0].path=missing.jsonl: no such file or folder"
    assert "bad.jsonl:2:" in second and "b.jsonl:1: data.mix[3].prompt_column=q: no such column" in third
    assert [
        len(source)
        for source in collect_user_errors([make(0, part("a", 2).path), make(1, part("b", 3).path)])
    ] == [2, 3]
