"""Helpers for tests of make_experience and learn: rows of given lengths, stub models and plain settings."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from ppo_ds.algorithm.credit.keys import ADVANTAGE_ESTIMATORS
from ppo_ds.algorithm.credit.positions import ScorePosition
from ppo_ds.algorithm.credit.responses import CreditOptions, Responses
from ppo_ds.algorithm.credit.whitening import Whitening
from ppo_ds.algorithm.kl.keys import KL_ESTIMATORS
from ppo_ds.algorithm.rollout_is.keys import NoWeights
from ppo_ds.algorithm.shaping.scores import ScoreShaper
from ppo_ds.background.pending import Pending
from ppo_ds.config.registry import import_target
from ppo_ds.config.sections.algo import GAEConfig, RewardShapingConfig
from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ppo.collector import scored, scores_of
from ppo_ds.ppo.experience import ExperienceMaker
from ppo_ds.ppo.model_outputs import ModelForwards
from ppo_ds.types import Experience, Rollout, Scores

NAN = float("nan")
RUBBISH = 1e6

PARTS = {"right": 1.0, "form": 0.5}  # names and weights of the parts of a reward

AS_IT_IS = Whitening(over="none", unbiased=False, level="token")
ON_THE_LAST = ScorePosition("last_token", "trained")


def timer(phase):
    return nullcontext()


def shaper(world, normalize="none", with_std=True, clip=None, **penalties):
    """Makes a reward shaper that leaves scores unchanged, except for the given settings."""
    shaping = RewardShapingConfig(normalize=normalize, normalize_std=with_std, clip=clip, **penalties)
    return ScoreShaper(shaping, world.sum)


@dataclass(frozen=True)
class Estimator:
    """An estimator of the registry with its settings, which ``maker`` takes as ``estimate_advantages``."""

    name: str
    credit: CreditOptions
    position: ScorePosition
    group_size: int = 1

    def __call__(self, rewards, values, scores, rollout):
        given = Responses.of_rollout(rollout, self.position, rewards, scores, values, self.group_size)
        return import_target(ADVANTAGE_ESTIMATORS[self.name].function)(given, self.credit)


def gae(level="token", position=None, place=ON_THE_LAST, gamma=1.0, lam=1.0, **changes):
    """Makes a GAE estimator on token level with gamma 1 and lambda 1, so that returns are rewards-to-go."""
    section = GAEConfig(gamma=gamma, lam=lam, **changes)
    return Estimator("gae", CreditOptions(gae=section, action_level=level, value_position=position), place)


def critic_free(kind, gamma=1.0, group_size=1, place=ON_THE_LAST, reduce=None):
    """Makes an estimator of config/registry.py that needs no critic. ``reduce`` sums over all ranks."""
    credit = CreditOptions(gae=GAEConfig(gamma=gamma), part_weights=PARTS, reduce=reduce)
    return Estimator(kind, credit, place, group_size)


def kl_estimator(name):
    return import_target(KL_ESTIMATORS[name].target)


class Stub:
    """Stands in for a model: log-probs are -(token + shift) / 10, and NaN on padding.

    As a critic it returns values: the id of the next response token for each state, and 6 for the last state.
    """

    def __init__(self, shift=0.0, value=False):
        self.shift, self.value = shift, value
        self.is_resident = False
        self.forwards = 0

    def __call__(self, ids, attention_mask, response_width):
        assert not torch.is_grad_enabled()
        self.forwards += 1
        if self.value:
            states, answered = (
                attention_mask[:, -response_width - 1 :],
                pad(attention_mask[:, -response_width:], (0, 1)),
            )
            return (
                torch.where(answered, pad(ids[:, -response_width:], (0, 1)), 6)
                .double()
                .masked_fill(~states, NAN)
            )
        answers = ids[:, -response_width:].double()
        return PolicyOutput(
            (-(answers + self.shift) / 10).masked_fill(~attention_mask[:, -response_width:], NAN),
            None,
            None,
            None,
        )

    @contextmanager
    def resident(self):
        self.is_resident = True
        yield
        self.is_resident = False


class MakerOfScored(ExperienceMaker):
    """Makes experience from a rollout that holds its scores already."""

    def __call__(self, rollout, kl_coef, critic_only=False):
        return super().__call__(rollout, Pending.of(scores_of(rollout)), kl_coef, critic_only)


def maker(world, reference=None, critic=None, **changes):
    """Makes a MakerOfScored with log pi = -token / 10, log pi_ref = log pi - 0.2 and V = the next token.

    The KL is subtracted from the reward, returns are rewards-to-go, and nothing is whitened.
    """
    forwards = dict(
        actor=Stub(),
        lagged=None,
        reference=reference or Stub(shift=2.0),
        critic=critic or Stub(value=True),
        share_trunk=False,
        old_logprobs="forward",
        token_budget=1000,
        guard=lambda run: run,
        packed=False,
        world=world,
        timer=timer,
        kept=None,
    )
    parts = dict(
        masked_stop_ids=(),
        shaper=shaper(world),
        charged_kl=kl_estimator("k1"),
        score_position=ON_THE_LAST,
        estimate_advantages=gae(),
        whitening=AS_IT_IS,
        group_size=1,
        rollout_is=NoWeights(),
        world=world,
        timer=timer,
        check=lambda: None,
    )
    forwards |= {name: changes.pop(name) for name in list(changes) if name in forwards}
    parts |= {"forwards": ModelForwards(**forwards)} | changes
    if isinstance(estimator := parts["estimate_advantages"], Estimator):
        parts["estimate_advantages"] = import_target(ADVANTAGE_ESTIMATORS[estimator.name].function)
        parts |= {"credit": estimator.credit}
        parts |= {} if "group_size" in changes else {"group_size": estimator.group_size}
        parts |= {} if "score_position" in changes else {"score_position": estimator.position}
    return MakerOfScored(**parts)


def critic_free_maker(world, **changes):
    """Makes the maker of a run without a critic, or with the value head on the actor."""
    make = maker(world, **changes)
    return replace(make, forwards=replace(make.forwards, critic=None))


def without(rows, *names):
    """Returns the same experience without these columns."""
    return replace(rows, **dict.fromkeys(names))


def without_critic(rows):
    return without(rows, "values", "returns", "value_mask")


def attended(prompts, responses):
    """Returns the [B,T] bool mask of rows with these prompt and response lengths."""
    p, r = max(prompts), max(responses)
    places = torch.arange(p + r)
    return (places >= p - torch.tensor(prompts)[:, None]) & (places < p + torch.tensor(responses)[:, None])


def answers(lengths, scores=None, *, finished=None, limits=None, tokens=None, metadata=None, **components):
    """Makes a scored rollout of finished responses with these lengths to prompts of one token.

    Unless ``limits`` are given, the limit is one token more than the longest response. ``tokens`` is a list
    of ids for each response; by default all ids are 5. The padding holds 9.
    """
    n, width = len(lengths), max(max(lengths), 1)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.full((n, 1 + width), 9)
    ids[:, 0] = 8
    for i, length in enumerate(lengths):
        ids[i, 1 : 1 + length] = torch.tensor(tokens[i]) if tokens else 5
    rollout = Rollout(
        ids=ids,
        attention_mask=torch.cat([torch.ones(n, 1, dtype=torch.bool), mask], 1),
        response_mask=mask,
        finished=torch.tensor(finished or [True] * n),
        limits=torch.tensor(limits or [max(lengths) + 1] * n),
        logprobs=torch.zeros(n, width),
        metadata=metadata or tuple({} for _ in lengths),
    )
    columns = {name: torch.tensor(column) for name, column in components.items()}
    return scored(rollout, Scores(torch.tensor(scores or [0.0] * n), torch.zeros(n, width), columns))


def rounded(x):
    return [[round(v, 4) for v in row] for row in x.tolist()]


def make_experience(prompts, responses, vocabulary=12, seed=0, finished=None):
    """Makes an experience with all columns from rows with these prompt and response lengths.

    It holds seeded noise under the masks and arbitrary values outside of them.
    """
    g = torch.Generator().manual_seed(seed)
    attention = attended(prompts, responses)
    mask = attention[:, max(prompts) :]
    n, r = mask.shape
    states = pad(mask, (0, 1))

    def column(scale=1.0, under=mask):
        return (scale * torch.randn(under.shape, generator=g)).masked_fill(~under, RUBBISH)

    logprobs = column().abs().neg()
    return Experience(
        ids=torch.randint(0, vocabulary, attention.shape, generator=g),
        attention_mask=attention,
        response_mask=mask,
        finished=torch.ones(n, dtype=torch.bool) if finished is None else torch.tensor(finished),
        decode_logprobs=logprobs,
        logprobs=logprobs,
        old_logprobs=logprobs,
        ref_logprobs=(logprobs + column(0.3)).masked_fill(~mask, RUBBISH),
        values=column(under=states),
        rewards=column(under=states),
        advantages=column(),
        weights=torch.ones(n, r).masked_fill(~mask, RUBBISH),
        returns=column(2.0, states),
        value_mask=states,
        scores=torch.randn(n, generator=g),
    )


def real(rows):
    """Returns each row's values under its masks as plain lists."""
    out = []
    for i in range(len(rows)):
        mask = rows.response_mask[i]
        under = (
            rows.ids[i][rows.attention_mask[i]],
            rows.advantages[i][mask],
            rows.returns[i][rows.value_mask[i]],
        )
        out.append([*(column.tolist() for column in under), float(rows.scores[i]), bool(rows.finished[i])])
    return out


JUNK = 1e6


def two_groups():
    """Makes two prompts with two responses each.

    They are [a b <eos>], [<eos>], [a b c] (truncated), [a b <eos>]. The padding holds arbitrary values.
    """
    ids = torch.tensor([[9, 5, 3, 4, 1], [9, 5, 1, 9, 9], [6, 7, 3, 4, 5], [6, 7, 3, 4, 1]])
    attention = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    mask = attention[:, 2:]

    def column(*rows):
        return torch.tensor([[*row, *[JUNK] * (3 - len(row))] for row in rows])

    def states(*rows):
        return torch.tensor([[*row, *[JUNK] * (4 - len(row))] for row in rows])

    zeros = torch.zeros(4, 3)
    return Experience(
        ids=ids,
        attention_mask=attention,
        response_mask=mask,
        finished=torch.tensor([True, True, False, True]),
        decode_logprobs=column([-1.0, -1.25, -1.0], [-2.0], [-1.0, -1.0, -0.25], [-1.0, -1.0, -1.0]),
        logprobs=column([-1.0, -1.0, -1.0], [-2.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]),
        old_logprobs=zeros - JUNK,
        ref_logprobs=column([-1.5, -0.8, -1.0], [-2.5], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.9]).masked_fill(
            ~mask, -JUNK
        ),
        values=states([1.0, 2.0, 3.0], [9.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        rewards=torch.nn.functional.pad(torch.tensor([[1.0], [0.0], [0.0], [-1.0]]) * mask, (0, 1)),
        advantages=zeros,
        weights=zeros,
        returns=states([1.0, 1.0, 1.0], [1.0], [0.0, 0.0, 0.0], [2.0, 2.0, 2.0]),
        value_mask=torch.nn.functional.pad(mask, (0, 1)),
        scores=torch.tensor([1.0, 1.0, 0.0, 4.0]),
    )
