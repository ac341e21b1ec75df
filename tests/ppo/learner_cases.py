"""Helpers for tests of learn(): a tiny policy and critic, an engine, and an independent implementation."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ppo_ds.algorithm.kl.keys import KL_ESTIMATORS
from ppo_ds.algorithm.loss.aggregation import seq_mean_token_mean, seq_mean_token_sum
from ppo_ds.algorithm.loss.keys import LOSS_AGGREGATIONS
from ppo_ds.algorithm.policy.keys import POLICY_LOSSES
from ppo_ds.config.registry import import_target
from ppo_ds.config.sections.algo import EntropyConfig, ValueConfig
from ppo_ds.engine.trained import StepInfo
from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ppo.health import ParityMonitor
from ppo_ds.ppo.learner import Learner, RatioCounts, Schedule
from ppo_ds.ppo.losses import (
    EntropyTerm,
    LoadBalancingTerm,
    PolicyTerm,
    PositiveNLLTerm,
    ReferenceKLTerm,
    ValueObjective,
)
from ppo_ds.ppo.minibatches import minibatches, whitened, without_truncated
from ppo_ds.run.health import Health
from ppo_ds.run.stage import StepContext
from tests.ppo.algo_cases import timer

V, LR, NORM = 12, 0.5, 7
PROMPTS, ANSWERS = [3, 1, 2, 5, 1, 2, 4, 2], [2, 6, 1, 3, 4, 1, 5, 2]
POLICY = dict(
    level="token", kind="ppo", clip_low=0.2, clip_high=None, dual_clip=None, agg="token_mean",
    entropy_coef=0.0, entropy_kind="exact", kl_in_loss=False, kl_estimator="k2", aux_coef=0.0,
    positive_nll=0.0, above=0.0,
    off_policy_limit=None, keys={},
)  # fmt: skip
VALUE = dict(clip=0.2, half=True, coef=1.0, agg="token_mean")


CLIP = ("clip_low", "clip_high", "dual_clip")


class Tiny(nn.Module):
    """Computes a number from all attended tokens up to each position: a log-prob of each response token, or a
    value of each state.
    """

    def __init__(self, out, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(V, 4, generator=g, dtype=torch.float64))
        self.head = nn.Parameter(torch.randn(4, out, generator=g, dtype=torch.float64))

    def states(self, ids, attention_mask, response_width):
        return torch.tanh((self.embed[ids] * attention_mask[..., None]).cumsum(1))[:, -response_width - 1 :]


class TinyPolicy(Tiny):
    """Computes log-probs and a balance loss; ``shared`` adds a value head.

    The balance loss is the mean of the squared embeddings of the response tokens.
    """

    def __init__(self, out, seed, shared=False, temperature=1.0):
        super().__init__(out, seed)
        self.value_head = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64)) if shared else None
        self.temperature = temperature

    def forward(
        self,
        ids,
        attention_mask,
        response_width,
        with_entropy=False,
        with_aux=False,
        temperature=None,
        entropy_gradient=True,
        label_mask=None,
    ):
        states = self.states(ids, attention_mask, response_width)
        table = (states[:, :-1] @ self.head / (temperature or self.temperature)).log_softmax(-1)
        logprobs = table.gather(-1, ids[:, -response_width:, None])[..., 0]
        if label_mask is not None:
            logprobs = torch.where(label_mask, logprobs, 0.0)
        return PolicyOutput(
            logprobs,
            -(table.exp() * table).sum(-1) if with_entropy else None,
            None if self.value_head is None else states @ self.value_head,
            self.embed[ids[:, -response_width:][attention_mask[:, -response_width:]]].square().sum(-1).mean()
            if with_aux
            else None,
        )


class TinyCritic(Tiny):
    def forward(self, ids, attention_mask, response_width):
        return (self.states(ids, attention_mask, response_width) @ self.head)[..., 0]


class Engine:
    """Implements the interface of TrainedModel with plain SGD.

    Gradients are averaged over ranks, and one step follows the backward marked as the last.
    """

    def __init__(self, module, world):
        self.module, self.world = module, world
        self.optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        self.flags, self.steps, self.backwards = [], 0, []
        self.skipped, self.loss_scale_can_decrease = [], False
        self.read = []  # the ids of each forward

    def __call__(self, *args, **kwargs):
        self.read.append(args[0].tolist())
        return self.module(*args, **kwargs)

    def backward(self, loss, last):
        assert not any(self.flags), "a backward after the last one"
        self.flags.append(last)
        loss.backward()

    def local_squared_grad_norm(self):
        """Returns the squared norm of this rank's gradient.

        Its sum over ranks is finite if and only if the squared norm of the mean gradient is finite.
        """
        return sum(parameter.grad.square().sum() for parameter in self.module.parameters())

    def skip(self, *, overflow):
        self.skipped.append(overflow)
        self.flags = []
        self.optimizer.zero_grad()
        return self.skipped_step()

    def skipped_step(self):
        return StepInfo(float("nan"), LR / (self.steps + 1), True, 1.0)

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


def old_around(made, scale=0.5):
    """Returns the same rows with old log-probs close to the log-probs of the fresh policy."""
    with torch.no_grad():
        fresh = TinyPolicy(V, 1)(made.ids, made.attention_mask, made.response_width).logprobs
    noise = scale * torch.randn(fresh.shape, generator=torch.Generator().manual_seed(4))
    old = torch.where(made.response_mask, (fresh + noise).float(), made.logprobs)
    return replace(made, logprobs=old, old_logprobs=old)


def on_policy(rows):
    """Returns the same rows; their old log-probs are those of the actor from which learned() starts.

    Old log-probs outside the mask keep their arbitrary values.
    """
    fresh = TinyPolicy(V, 1)
    with torch.no_grad():
        logprobs, entropy, *_ = fresh(rows.ids, rows.attention_mask, rows.response_width, with_entropy=True)
    mask = rows.response_mask
    current = logprobs.masked_fill(~mask, 1e6)
    return replace(rows, logprobs=current, old_logprobs=current), entropy[mask]


def policy_terms(**changes):
    """Makes the terms of the actor's loss from the settings POLICY with these changes."""
    made = POLICY | changes
    variant = POLICY_LOSSES[made["kind"]]
    keys = {name: made[name] for name in CLIP if name in variant.model_fields} | made["keys"]
    agg = policy_agg = import_target(LOSS_AGGREGATIONS[made["agg"]].function)
    if made["level"] == "sequence":
        agg = seq_mean_token_sum
        policy_agg = seq_mean_token_sum if variant.sums_over_tokens else seq_mean_token_mean
    policy = variant(**keys, off_policy_limit=made["off_policy_limit"])
    entropy = EntropyConfig(coef=made["entropy_coef"], kind=made["entropy_kind"])
    terms = [
        PolicyTerm(import_target(variant.function), policy, variant.ratio or made["level"], policy_agg),
        EntropyTerm(entropy, agg),
    ]
    if made["kl_in_loss"]:
        terms.append(ReferenceKLTerm(import_target(KL_ESTIMATORS[made["kl_estimator"]].target), agg))
    if made["aux_coef"]:
        terms.append(LoadBalancingTerm(made["aux_coef"]))
    if made["positive_nll"]:
        terms.append(PositiveNLLTerm(made["positive_nll"], made["above"]))
    return tuple(terms)


def value_objective(**changes):
    """Makes a value objective from the settings VALUE with these changes."""
    made = VALUE | changes
    section = ValueConfig(**{name: made[name] for name in ("clip", "half", "coef")})
    return ValueObjective(section, import_target(LOSS_AGGREGATIONS[made["agg"]].function))


def learner(
    world, actor, critic, policy=None, value=None, budget=10_000, minibatch_size=4, epochs=2, target_kl=None,
    health=None, timer=timer, whitening=None, mask_truncated=False, counts_ratios=False, parity=None,
    decoded_old_logprobs=False, **changes,
):  # fmt: skip
    chosen = [] if whitening is None else [partial(whitened, whitening=whitening)]
    chosen += [without_truncated] if mask_truncated else []
    parity = parity or ParityMonitor(None, stops=True)
    plain = dict(
        actor=actor, critic=critic, average=None, transforms=chosen, terms=policy_terms(**policy or {}),
        value=value_objective(**value or {}), ptx=None, norm=NORM,
        schedule=Schedule(epochs, minibatch_size, target_kl), token_budget=budget, packed=False,
        context=StepContext(world=world, timer=timer, health=health or Health(max_skips=1000)),
        parity=replace(parity, old_from_rollout=decoded_old_logprobs),
        ratios=RatioCounts(world) if counts_ratios else None,
    )  # fmt: skip
    return Learner(**plain | changes)


def learned(world, rows, kl_coef=0.0, seed=3, **changes):
    """Returns the metrics, the actor and the critic after training on one experience."""
    actor, critic = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world)
    return learner(world, actor, critic, **changes)(rows, kl_coef, seed)[1], actor, critic


def same(engines, modules):
    """Asserts that the engines have the weights of the modules, to the precision of float32 losses."""
    for engine, module in zip(engines, modules, strict=True):
        for ours, theirs in zip(engine.module.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def shuffled(n_rows, epochs, minibatch_size, seed):
    """Returns the row indices of every optimizer step of learn()."""
    generator = torch.Generator().manual_seed(seed)
    return [rows for _ in range(epochs) for rows in minibatches(n_rows, minibatch_size, generator)]


# -- the independent implementation --------------------------------------------------------------------------


def mean(per_row, agg):
    """Aggregates lists of token losses, one list per row."""
    sums = [sum(row) for row in per_row]
    if agg == "token_mean":
        return sum(sums) / sum(len(row) for row in per_row)
    if agg == "seq_mean_token_mean":
        return sum(total / len(row) for total, row in zip(sums, per_row, strict=True)) / len(per_row)
    return sum(sums) / (NORM * len(per_row) if agg == "token_sum_norm" else len(per_row))


def unpadded(rows, i):
    """Returns ids [1,T], a mask of ones and the response length."""
    kept = rows.attention_mask[i]
    return (
        rows.ids[i][kept][None],
        torch.ones(1, int(kept.sum()), dtype=torch.bool),
        int(rows.response_lengths[i]),
    )


def by_hand(
    rows,
    policy=None,
    value=None,
    minibatch_size=4,
    epochs=2,
    kl_coef=0.0,
    seed=3,
    steps=None,
    shared=False,
    left_out=None,
    mask_truncated=False,
):
    """Runs the same optimizer steps token by token on unpadded rows.

    Only the first ``steps`` are run, except the step with index ``left_out``. With ``shared`` the policy's
    value head computes the values. With ``mask_truncated`` rows that are not finished are left out.
    """
    shape, vshape = POLICY | (policy or {}), VALUE | (value or {})
    actor, critic = TinyPolicy(V, 1, shared=shared), TinyCritic(1, 2)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=LR)
    low, high = 1 - shape["clip_low"], 1 + (shape["clip_high"] or shape["clip_low"])
    order = shuffled(len(rows), epochs, minibatch_size, seed)[:steps]
    for part in [part for i, part in enumerate(order) if i != left_out]:
        surrogate, entropies, kls, errors, squares = [], [], [], [], []
        likelihoods = []  # of the correct responses
        for i in [i for i in part.tolist() if rows.finished[i] or not mask_truncated]:
            inputs = ids, _, r = unpadded(rows, i)
            logprobs, entropy, own = actor(*inputs, with_entropy=True)[:3]
            values = own if shared else critic(*inputs)
            for column in (surrogate, entropies, kls, errors, squares):
                column.append([])
            if rows.scores[i] > shape["above"]:
                likelihoods.append([-logprobs[0, t] for t in range(r)])
            for t in range(r):
                old, advantage = float(rows.old_logprobs[i, t]), float(rows.advantages[i, t])
                ratio = torch.exp(logprobs[0, t] - old)
                objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
                if shape["dual_clip"] and advantage < 0:
                    objective = objective.clamp(min=shape["dual_clip"] * advantage)
                surrogate[-1].append(-objective)
                entropies[-1].append(entropy[0, t])
                kls[-1].append((logprobs[0, t] - float(rows.ref_logprobs[i, t])) ** 2 / 2)
                squares[-1].append(actor.embed[ids[0, t - r]].square().sum())
                v, old_v, target = values[0, t], float(rows.values[i, t]), float(rows.returns[i, t])
                error = (v - target) ** 2
                if vshape["clip"]:
                    error = torch.maximum(
                        error, (v.clamp(old_v - vshape["clip"], old_v + vshape["clip"]) - target) ** 2
                    )
                errors[-1].append(error / 2 if vshape["half"] else error)
        loss = mean(surrogate, shape["agg"]) - shape["entropy_coef"] * mean(entropies, shape["agg"])
        loss = loss + shape["aux_coef"] * mean(squares, "token_mean")
        if shape["kl_in_loss"]:
            loss = loss + kl_coef * mean(kls, shape["agg"])
        if likelihoods:
            loss = loss + shape["positive_nll"] * mean(likelihoods, "token_mean")
        optimizer.zero_grad()
        (loss + vshape["coef"] * mean(errors, vshape["agg"])).backward()
        optimizer.step()
    return actor, critic
