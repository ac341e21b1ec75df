"""learn() against a straightforward loop over rows and tokens, in float64, without micro-batches, ranks or totals."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from ppo_ds.algo.exchange import minibatches
from ppo_ds.algo.learner import Learner, PolicyObjective, ValueObjective, describe_steps
from ppo_ds.engine.trained import StepInfo
from ppo_ds.types import Sequences

V, LR = 12, 0.5
PROMPTS, ANSWERS = [3, 1, 2, 5, 1, 2, 4, 2], [2, 6, 1, 3, 4, 1, 5, 2]
POLICY = dict(clip_low=0.2, clip_high=None, dual_clip=None, agg="token_mean", entropy_coef=0.0, kl_in_loss=False, kl_estimator="k2")
VALUE = dict(clip=0.2, half=True, coef=1.0, agg="token_mean")


class Tiny(nn.Module):
    """Something of every attended token so far -> a log-prob or a value for each response place."""

    def __init__(self, out, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(V, 4, generator=g, dtype=torch.float64))
        self.head = nn.Parameter(torch.randn(4, out, generator=g, dtype=torch.float64))

    def states(self, ids, attention_mask):
        return torch.tanh((self.embed[ids] * attention_mask[..., None]).cumsum(1)) @ self.head


class TinyPolicy(Tiny):
    def forward(self, ids, attention_mask, response_width, with_entropy=False):
        table = self.states(ids, attention_mask)[:, -response_width - 1 : -1].log_softmax(-1)
        logprobs = table.gather(-1, ids[:, -response_width:, None])[..., 0]
        return logprobs, -(table.exp() * table).sum(-1) if with_entropy else None


class TinyCritic(Tiny):
    def forward(self, ids, attention_mask, response_width):
        return self.states(ids, attention_mask)[:, -response_width - 1 : -1, 0]


class Engine:
    """What TrainedModel promises: gradients are averaged over ranks, and one SGD step follows the backward marked as the last."""

    def __init__(self, module, world):
        self.module, self.world = module, world
        self.optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        self.flags, self.steps, self.backwards = [], 0, []

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss, last):
        assert not any(self.flags), "a backward after the last one"
        self.flags.append(last)
        loss.backward()

    def step(self):
        assert self.flags[-1], "no backward was marked as the last"
        self.backwards.append(len(self.flags))
        self.flags, self.steps = [], self.steps + 1
        for parameter in self.module.parameters():
            parameter.grad = self.world.sum(parameter.grad) / self.world.size
        norm = float(nn.utils.get_total_norm([p.grad for p in self.module.parameters()]))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepInfo(norm, LR / self.steps, False, 1.0)


def timer(phase):
    return nullcontext()


@pytest.fixture
def rows(experience):
    """Old log-probs around those of a fresh policy, so that ratios fall on both sides of every clip."""
    made = experience(PROMPTS, ANSWERS)
    with torch.no_grad():
        fresh, _ = TinyPolicy(V, 1)(made.ids, made.attention_mask, made.response_width)
    noise = 0.5 * torch.randn(fresh.shape, generator=torch.Generator().manual_seed(4))
    return replace(made, logprobs=torch.where(made.response_mask, (fresh + noise).float(), made.logprobs))


def learned(world, rows, policy=None, value=None, budget=10_000, minibatch_size=4, epochs=2, kl_coef=0.0, seed=3):
    actor, critic = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world)
    learn = Learner(
        actor=actor, critic=critic, world=world, epochs=epochs, minibatch_size=minibatch_size, token_budget=budget,
        policy=PolicyObjective(**POLICY | (policy or {})), value=ValueObjective(**VALUE | (value or {})), timer=timer,
    )  # fmt: skip
    return learn(rows, kl_coef, seed), actor, critic


# -- the independent implementation ---------------------------------------------------------------------------------------------------------


def mean(per_row, agg):
    """Lists of token losses, one list a row -> the aggregated loss."""
    sums = [sum(row) for row in per_row]
    if agg == "token_mean":
        return sum(sums) / sum(len(row) for row in per_row)
    if agg == "seq_mean_token_mean":
        return sum(total / len(row) for total, row in zip(sums, per_row, strict=True)) / len(per_row)
    return sum(sums) / len(per_row)


def by_hand(rows, policy=None, value=None, minibatch_size=4, epochs=2, kl_coef=0.0, seed=3):
    """The same optimizer steps, token by token on unpadded rows."""
    shape, vshape = POLICY | (policy or {}), VALUE | (value or {})
    actor, critic = TinyPolicy(V, 1), TinyCritic(1, 2)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=LR)
    low, high = 1 - shape["clip_low"], 1 + (shape["clip_high"] or shape["clip_low"])
    for part in minibatches(len(rows), epochs, minibatch_size, torch.Generator().manual_seed(seed)):
        surrogate, entropies, kls, errors = [], [], [], []
        for i in part.tolist():
            kept = rows.attention_mask[i]
            ids, ones, r = rows.ids[i][kept][None], torch.ones(1, int(kept.sum()), dtype=torch.bool), ANSWERS[i]
            logprobs, entropy = actor(ids, ones, r, with_entropy=True)
            values = critic(ids, ones, r)
            for column in (surrogate, entropies, kls, errors):
                column.append([])
            for t in range(r):
                old, advantage = float(rows.logprobs[i, t]), float(rows.advantages[i, t])
                ratio = torch.exp(logprobs[0, t] - old)
                objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
                if shape["dual_clip"] and advantage < 0:
                    objective = objective.clamp(min=shape["dual_clip"] * advantage)
                surrogate[-1].append(-objective)
                entropies[-1].append(entropy[0, t])
                kls[-1].append((logprobs[0, t] - float(rows.ref_logprobs[i, t])) ** 2 / 2)
                v, old_v, target = values[0, t], float(rows.values[i, t]), float(rows.returns[i, t])
                error = (v - target) ** 2
                if vshape["clip"]:
                    error = torch.maximum(error, (v.clamp(old_v - vshape["clip"], old_v + vshape["clip"]) - target) ** 2)
                errors[-1].append(error / 2 if vshape["half"] else error)
        loss = mean(surrogate, shape["agg"]) - shape["entropy_coef"] * mean(entropies, shape["agg"])
        if shape["kl_in_loss"]:
            loss = loss + kl_coef * mean(kls, shape["agg"])
        optimizer.zero_grad()
        (loss + vshape["coef"] * mean(errors, vshape["agg"])).backward()
        optimizer.step()
    return actor, critic


def same(engines, modules):
    for engine, module in zip(engines, modules, strict=True):
        for ours, theirs in zip(engine.module.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # the losses are float32 at their narrowest


OBJECTIVES = {
    "plain": {},
    "entropy": dict(policy=dict(entropy_coef=0.3)),
    "kl": dict(policy=dict(kl_in_loss=True), kl_coef=0.7),
    "asymmetric": dict(policy=dict(clip_low=0.1, clip_high=0.5, dual_clip=1.5)),
    "sequence_mean": dict(policy=dict(agg="seq_mean_token_mean", entropy_coef=0.3), value=dict(agg="seq_mean_token_mean")),
    "sequence_sum": dict(policy=dict(agg="seq_mean_token_sum"), value=dict(agg="seq_mean_token_sum")),
    "value": dict(value=dict(clip=None, half=False, coef=0.1)),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_the_weights_after_all_steps_are_those_of_the_loop_by_hand(world, rows, objective, budget):
    settings = OBJECTIVES[objective]
    seen, actor, critic = learned(world, rows, budget=budget, **settings)
    same((actor, critic), by_hand(rows, **settings))
    assert actor.steps == critic.steps == 4
    assert seen["policy/clipfrac"] > 0 and (seen["policy/clipfrac_low"] > 0) == (objective == "asymmetric")
    assert (seen["value/clipfrac"] > 0) == (objective != "value")
    before = TinyPolicy(V, 1)
    assert (actor.module.head - before.head).abs().max() > 1e-3  # something was learned


@pytest.mark.parametrize("objective", ["plain", "kl", "sequence_mean"])
@pytest.mark.parametrize(("ranks", "budget"), [(2, 1), (2, 24), (4, 10_000)])
def test_ranks_change_neither_weights_nor_numbers(on_ranks, world, rows, objective, ranks, budget):
    settings = OBJECTIVES[objective]
    alone, *engines = learned(world, rows, **settings)
    for numbers, *others in on_ranks(ranks, lambda world: learned(world, rows, budget=budget, **settings)):
        same(others, [engine.module for engine in engines])
        assert numbers == pytest.approx(alone, rel=1e-6, abs=1e-7)


def test_minibatch_size_makes_the_steps(world, rows):
    for size, steps in ((8, 3), (4, 6), (2, 12)):
        _, actor, critic = learned(world, rows, minibatch_size=size, epochs=3)
        same((actor, critic), by_hand(rows, minibatch_size=size, epochs=3))
        assert actor.steps == steps and actor.backwards == [1] * steps


def test_the_seed_orders_the_rows(world, rows):
    heads = [learned(world, rows, seed=seed)[1].module.head for seed in (3, 3, 4)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


# -- numbers ------------------------------------------------------------------------------------------------------------------------------


def on_policy(rows):
    """The same rows with the old log-probs of the actor that learned() starts from; rubbish stays outside the mask."""
    fresh = TinyPolicy(V, 1)
    with torch.no_grad():
        logprobs, entropy = fresh(rows.ids, rows.attention_mask, rows.response_width, with_entropy=True)
    mask = rows.response_mask
    return type(rows)(**{**vars(rows), "logprobs": logprobs.masked_fill(~mask, 1e6)}), entropy[mask]


def test_the_first_ratio_is_one_and_one_step_reports_the_state_before_it(world, rows):
    rows, entropies = on_policy(rows)
    seen, actor, _ = learned(world, rows, minibatch_size=8, epochs=1, budget=20)
    advantages = rows.advantages[rows.response_mask]
    assert seen["parity/ratio_first_minibatch_max"] == seen["policy/ratio_max"] == pytest.approx(1, abs=1e-9)
    assert seen["policy/ratio_mean"] == pytest.approx(1) and seen["policy/clipfrac"] == seen["policy/clipfrac_low"] == 0
    assert seen["policy/approx_kl"] == pytest.approx(0, abs=1e-12) and seen["policy/kl_k1"] == pytest.approx(0, abs=1e-9)
    assert seen["policy/loss"] == pytest.approx(-float(advantages.mean()), rel=1e-6)
    assert seen["policy/entropy"] == pytest.approx(float(entropies.mean()), rel=1e-6)
    assert seen["policy/epochs_run"] == 1.0 and "policy/kl_loss" not in seen
    assert actor.backwards[0] > 1


def test_the_first_minibatchs_ratio_is_of_the_first_step_alone(world, rows):
    rows, _ = on_policy(rows)
    seen, *_ = learned(world, rows, minibatch_size=2, epochs=2, budget=1)
    assert seen["parity/ratio_first_minibatch_max"] == pytest.approx(1, abs=1e-9) and seen["policy/ratio_max"] > 1.01


def test_value_numbers(world, rows):
    seen, *_ = learned(world, rows, minibatch_size=8, epochs=1, budget=20, value=dict(clip=None, coef=0.1))
    with torch.no_grad():
        values = TinyCritic(1, 2)(rows.ids, rows.attention_mask, rows.response_width)[rows.response_mask]
    returns = rows.returns[rows.response_mask].double()
    assert seen["value/loss"] == pytest.approx(float((values - returns).square().mean() / 2), rel=1e-6)  # without the coefficient
    assert seen["value/explained_var"] == pytest.approx(float(1 - (returns - values).var() / returns.var()), rel=1e-5)
    assert seen["value/mean"] == pytest.approx(float(values.mean()), rel=1e-6) and seen["value/clipfrac"] == 0


def test_the_kl_in_the_loss_is_reported(world, rows):
    rows, _ = on_policy(rows)
    seen, *_ = learned(world, rows, minibatch_size=8, epochs=1, kl_coef=0.7, policy=dict(kl_in_loss=True))
    d = (rows.logprobs - rows.ref_logprobs)[rows.response_mask].double()
    assert seen["policy/kl_loss"] == pytest.approx(float((d**2 / 2).mean()), rel=1e-5)


def test_gradient_norms_are_those_of_the_whole_step_averaged_over_steps(world, rows):
    reference = TinyPolicy(V, 1)
    rows, _ = on_policy(rows)
    logprobs, _ = reference(rows.ids, rows.attention_mask, rows.response_width)
    mask = rows.response_mask
    (-(logprobs - rows.logprobs)[mask].exp() * rows.advantages[mask]).mean().backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    seen, *_ = learned(world, rows, minibatch_size=8, epochs=1, budget=20)
    assert seen["policy/grad_norm"] == pytest.approx(float(expected), rel=1e-6)


def test_describe_steps():
    infos = {
        "policy": [StepInfo(1.0, 0.1, False, 8.0), StepInfo(3.0, 0.2, True, 4.0)],
        "value": [StepInfo(5.0, 0.3, True, 1.0), StepInfo(7.0, 0.4, False, 1.0)],
    }
    assert describe_steps(infos) == {
        "policy/grad_norm": 2.0,
        "policy/lr": 0.2,
        "value/grad_norm": 6.0,
        "value/lr": 0.4,
        "health/skipped_steps": 2.0,
        "health/loss_scale": 4.0,
    }


def test_an_answer_without_actions_weighs_nothing(world, experience):
    """A row whose mask is empty (all of it was cut away) still runs through every forward, and changes no gradient."""
    full = experience([2, 2, 2], [3, 1, 2])
    empty = full.select(torch.tensor([0, 1, 2, 1]))
    mask, attention = empty.response_mask.clone(), empty.attention_mask.clone()
    mask[3], attention[3, 2:] = False, False
    rows = type(full)(**{**vars(empty), "response_mask": mask, "attention_mask": attention})
    assert isinstance(rows, Sequences) and rows.response_lengths.tolist() == [3, 1, 2, 0]
    seen, *engines = learned(world, rows, minibatch_size=4, epochs=1, budget=1)
    _, *others = learned(world, full, minibatch_size=3, epochs=1)
    same(engines, [engine.module for engine in others])
    assert all(number == number for number in seen.values())
