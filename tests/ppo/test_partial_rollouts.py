"""Tests the collection of responses that are continued in later steps (rollout.partial)."""

import math
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.data.order import Passes
from ppo_ds.data.prompts import PromptStream, collate_prompts
from ppo_ds.errors import UserError
from ppo_ds.ppo.experience_metrics import version_metrics
from ppo_ds.ppo.partial_rollouts import PartialRolloutCollector
from ppo_ds.rewards.base import start_scoring
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.keys import RolloutConfig
from ppo_ds.rollout.static import StaticGenerator
from ppo_ds.types import Scores
from tests.ppo.test_collector import parts

V, EOS, PROMPTS = 12, 1, 240


class Source:
    """Holds PROMPTS prompts; prompt n is one to three tokens and the raw row {"n": n}."""

    key, unit, max_tokens_key, path, report = "data.path", "prompts", "", "memory", {"dropped": 0}

    def __len__(self):
        return PROMPTS

    def order(self, seed, shuffle):
        return Passes(PROMPTS, seed, shuffle)

    def batch(self, indices):
        rows = [([3 + i % 9] * (1 + i % 3), 10**6, {"n": i}) for i in indices]
        return collate_prompts(rows, 0)


def model(seed=0, scale=0.5):
    """Makes a tiny model; with scale 0 every token has the probability 1 / V."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        initializer_range=scale, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def score(rollout):
    return Scores(torch.zeros(len(rollout)), torch.zeros(rollout.response_mask.shape), {})


def collector(world, tokenizer, lm, share=4, samples=1, limit=30, slots=100, **section):
    settings = dict(backend="static", partial=True, prompts_per_step=share * world.size)
    settings |= dict(samples_per_prompt=samples, environment={}) | section
    common = parts() | dict(
        start_scoring=partial(start_scoring, score),
        sampling=SamplingParams(limit, 0, 1.0, 1.0, 0, (EOS,), ()),
    )
    made = PartialRolloutCollector(
        **common
        | dict(
            prompts=PromptStream(
                Source(),
                prompts_per_step=share * world.size,
                samples_per_prompt=samples,
                rank=world.rank,
                world_size=world.size,
            ),
            generator=StaticGenerator(lambda: lm, tokenizer=tokenizer, token_budget=slots * (limit + 3)),
            section=RolloutConfig.read(settings),
            tokenizer=tokenizer,
            world=world,
        )
    )
    made.actor.steps = 0
    return made


def collected(made, steps):
    """Collects the rollouts of ``steps`` steps, after each of which the policy has a new version."""
    rollouts = []
    for _ in range(steps):
        rollouts.append(made()[0])
        made.actor.steps += 1
    return rollouts


# -- lengths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "max_versions"), [(100, 100), (100, 2), (12, 3)])
def test_lengths_of_learned_responses_are_those_of_the_policy(world, tokenizer, slots, max_versions):
    """Every token ends a response with p = 1/12: lengths are geometric, cut at the limit of 30 tokens.

    With q = 11/12, their mean is (1 - q^30) / p = 11.12, and the share that reaches the limit without a stop
    is q^30 = 7.4 %. Over 75 steps of 20 responses, the standard error of the mean is 0.22 (the standard
    deviation of a length is 8.6), and that of the share is 0.68 %. At the end, 20 prompts of 1520 are not
    learned from, which moves the mean by at most 1.3 % x (30 - 11) = 0.25 and the share by 1.3 %. If the
    other responses were dropped, the mean would be about 6.
    """
    torch.manual_seed(11)
    made = collector(world, tokenizer, model(scale=0.0), share=20, slots=slots, max_versions=max_versions)
    rollouts = collected(made, 75)
    assert all(len(rollout) == 20 for rollout in rollouts)
    lengths = torch.cat([rollout.response_lengths for rollout in rollouts]).double()
    finished = torch.cat([rollout.finished for rollout in rollouts])
    q = 11 / 12
    assert abs(float(lengths.mean()) - (1 - q**30) * 12) < 3 * 0.22 + 0.25
    assert abs(float((~finished).double().mean()) - q**30) < 3 * 0.0068 + 0.013
    # the distribution function, by the bound of Dvoretzky, Kiefer and Wolfowitz at 0.1 %
    bound = math.sqrt(math.log(2 / 0.001) / (2 * 1500)) + 20 / 1500
    for length in range(1, 30):
        assert abs(float((lengths <= length).double().mean()) - (1 - q**length)) < bound
    versions = [version_metrics_of(rollout)["rollout/versions_max"] for rollout in rollouts]
    assert 2 <= max(versions) <= max_versions


def version_metrics_of(rollout):
    """Computes the metrics of a rollout as if it were an experience."""
    return {name: float(value) for name, value in version_metrics(rollout).items()}


def test_each_started_prompt_is_learned_from_once(world, tokenizer):
    made = collector(world, tokenizer, model(), samples=2, oversample=1.5)
    rollouts = collected(made, 30)
    learned = [row["n"] for rollout in rollouts for row in rollout.metadata]
    assert len(learned) == 30 * 4 * 2
    assert learned[::2] == learned[1::2]  # both responses to a prompt come together
    carried = [group.prompt for group in made.groups]
    drawn = [index for step in range(31) for index in made.prompts.indices(step)]
    assert Counter(learned) + Counter(2 * carried) == Counter(drawn)
    assert 4 <= len(carried) and sum(rollout.staleness.any() for rollout in rollouts) > 20


# -- versions ----------------------------------------------------------------------------------------------


def test_log_probs_are_those_of_the_versions_that_sampled_the_tokens(world, tokenizer):
    lm = model()
    made, saved, versions = collector(world, tokenizer, lm, oversample=2.5, max_versions=3), [], Counter()
    for step in range(12):
        saved.append(deepcopy(lm))
        made.actor.steps = 10 * step  # optimizer steps
        rollout, scores, found = made()
        assert len(scores.result().total) == len(rollout) == 4
        for i in range(len(rollout)):
            row = rollout.ids[i][rollout.attention_mask[i]]
            n, prompt = int(rollout.response_lengths[i]), int(rollout.prompt_lengths[i])
            stale = rollout.staleness[i, :n].tolist()
            assert stale == sorted(stale, reverse=True) and all(lag % 10 == 0 for lag in stale)
            versions[len(set(stale))] += 1
            for t, lag in enumerate(stale):
                with torch.no_grad():
                    logits = saved[step - lag // 10](input_ids=row[None, : prompt + t]).logits[0, -1]
                expected = logits.double().log_softmax(-1)[row[prompt + t]]
                assert abs(float(rollout.logprobs[i, t] - expected)) < 1e-5
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    assert versions.keys() == {1, 2, 3} and versions[2] + versions[3] > 10


def test_metrics_of_the_versions(rows_of_versions):
    """Rows of versions [0 1 1 2], [2] and [1 1], in a step of version 2."""
    assert version_metrics_of(rows_of_versions) == {
        "rollout/stale_token_frac": 5 / 7,
        "rollout/versions_mean": (3 + 1 + 1) / 3,
        "rollout/versions_max": 3.0,
    }


@pytest.fixture
def rows_of_versions(world, tokenizer):
    made = collector(world, tokenizer, model(), share=3)
    columns = {
        "prompts": [0, 1, 2],
        "ended": [True] * 3,
        "lengths": [4, 1, 2],
        "tokens": [5, 5, 5, EOS, EOS, 5, EOS],
        "logprobs": [0.0] * 7,
        "versions": [0, 1, 1, 2, 2, 1, 1],
    }
    state = {name: torch.tensor(column) for name, column in columns.items()}
    made.load_state_dict(state | {"checksums": made.checksums([0, 1, 2])})
    return made.rollout(made.groups, version=2)


# -- checkpoints and ranks ---------------------------------------------------------------------------------


def same(one, other):
    columns = one.tensors()
    assert columns.keys() == other.tensors().keys()
    assert all(torch.equal(column, other.tensors()[name]) for name, column in columns.items())
    assert one.metadata == other.metadata


def test_a_resumed_run_continues_the_same_responses_to_the_bit(world, tokenizer):
    lm = model()
    whole = collector(world, tokenizer, lm, samples=2)
    collected(whole, 3)
    state, draws = deepcopy([whole.state_dict(), whole.prompts.state_dict()]), torch.get_rng_state()
    expected = collected(whole, 3)
    resumed = collector(world, tokenizer, lm, samples=2)
    for component, part in zip((resumed, resumed.prompts), state, strict=True):
        component.load_state_dict(part)
    resumed.actor.steps = 3
    torch.set_rng_state(draws)
    for one, other in zip(expected, collected(resumed, 3), strict=True):
        same(one, other)
    assert any(rollout.staleness.any() for rollout in expected)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"samples": 1}, "rollout.samples_per_prompt=1: it was 2"),
        ({"limit": 1}, r"sampling.max_new_tokens=1: one of them has \d+ tokens"),
        ({"shift": 1}, "data.path=memory: its rows have changed"),
        ({"shift": PROMPTS}, "data.path=memory: its rows have changed"),
    ],
)
def test_responses_in_progress_are_not_given_to_other_prompts(world, tokenizer, changed, line):
    lm = model()
    before = collector(world, tokenizer, lm, samples=2)
    collected(before, 2)
    state = before.state_dict()
    state["prompts"] = state["prompts"] + changed.pop("shift", 0)
    resumed = collector(world, tokenizer, lm, **{"samples": 2} | changed)
    with pytest.raises(UserError, match=f"^{line}, so the responses in progress in the checkpoint cannot be"):
        resumed.load_state_dict(state)


def test_a_response_as_long_as_a_lower_limit_has_ended(world, tokenizer):
    made = collector(world, tokenizer, model())
    collected(made, 2)
    state = made.state_dict()
    longest = int(state["lengths"].max())
    made.sampling = replace(made.sampling, max_new_tokens=longest)
    made.load_state_dict(state | {"ended": torch.zeros_like(state["ended"])})
    lengths = [(len(one.tokens), one.ended) for group in made.groups for one in group.responses]
    assert longest > 0 and all(ended == (length == longest) for length, ended in lengths)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 4)])
def test_carried_responses_are_divided_among_the_ranks(on_ranks, tokenizer, before, after):
    def save(world):
        made = collector(world, tokenizer, model(), share=8 // before, samples=2)
        rollout = collected(made, 1)[0]
        return made.state_dict(), made.groups, len(rollout)

    saved = on_ranks(before, save)
    assert (
        all(torch.equal(state[name], saved[0][0][name]) for state, _, _ in saved for name in state)
        and [n for _, _, n in saved] == [16 // before] * before
    )

    def resume(world):
        made = collector(world, tokenizer, model(), share=8 // after, samples=2)
        made.load_state_dict(deepcopy(saved[0][0]))
        made.prompts.load_state_dict({"step": 2})
        groups = list(made.groups)
        made.actor.steps = 1
        return groups, made()[0], made.groups

    found = on_ranks(after, resume)
    carried = [vars(one) for _, groups, _ in saved for group in groups for one in group.responses]
    loaded = [vars(one) for groups, _, _ in found for group in groups for one in group.responses]
    assert len(loaded) == 16 and [len(groups) for groups, _, _ in found] == [8 // after] * after
    begun = [response["tokens"] for response in carried]
    assert [response["tokens"][: len(t)] for response, t in zip(loaded, begun, strict=True)] == begun
    assert all(len(rollout) == 16 // after for _, rollout, _ in found)
    assert all(len(groups) == 8 // after for _, _, groups in found)


def test_a_stop_request_leaves_the_responses_as_they_were(world, tokenizer):
    made = collector(world, tokenizer, model())
    collected(made, 1)
    before = {group.prompt: deepcopy([vars(one) for one in group.responses]) for group in made.groups}

    class Stopped(Exception):
        pass

    def check():
        raise Stopped

    made.check = check
    made.generator.should_stop = lambda: True
    made.prompts.load_state_dict({"step": 2})
    with pytest.raises(Stopped):
        made()
    carried = {group.prompt: group for group in made.groups}
    for prompt, responses in before.items():
        assert [vars(one) for one in carried[prompt].responses] == responses
