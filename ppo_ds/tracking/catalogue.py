"""Lists every metric that a run logs, with its meaning and healthy range, and the panels that show them.

`curves.png`, `report.html`, the dashboards and docs/metrics.md are made from this list. A test checks that
every metric that a stage logs is in it. `python -m ppo_ds.run.metrics_page > docs/metrics.md`
generates the page.

A healthy range is where a run usually stays if it learns. Most ranges are rules of thumb: ``reason`` names
the source or says so. A value outside its range is a reason to look, not an error.

Texts are Markdown with ``code`` and links only; ``plain`` removes the marks.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

Range = tuple[float | None, float | None]  # lowest and highest healthy value; None: no limit


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics whose name has a variable part, such as ``<name>``."""

    name: str
    label: str  # short name in a legend
    unit: str
    meaning: str
    healthy: Range | None = field(default=None, kw_only=True)
    reason: str = field(default="", kw_only=True)  # source of the range
    remedy: str = field(default="", kw_only=True)  # what to do, and which key to change
    percent: bool = field(default=False, kw_only=True)  # a share between 0 and 1


@dataclass(frozen=True)
class Panel:
    """One plot. It is drawn if there is data of its first metric."""

    title: str
    unit: str
    metrics: dict[str, str]  # maps names or patterns of metrics to labels in the legend
    band: str = field(default="", kw_only=True)  # the metric drawn as +- around the first curve
    # the band ends at the lowest value of the first and at the highest value of the second metric in the run
    band_limits: tuple[str, str] | None = field(default=None, kw_only=True)
    percent: bool = field(default=False, kw_only=True)
    from_zero: bool = field(default=False, kw_only=True)
    stacked: bool = field(default=False, kw_only=True)  # areas on top of each other
    overview: bool = field(default=False, kw_only=True)  # also in curves.png


@dataclass(frozen=True)
class Section:
    """The metrics and panels of one prefix."""

    title: str
    prefix: str  # of its metrics; "" for those without a prefix
    metrics: tuple[Metric, ...]
    panels: tuple[Panel, ...] = ()


_LOWER_LR = "lower `actor.optim.lr` or `algo.epochs`"

_REWARD = Section(
    "Reward",
    "reward",
    (
        Metric(
            "reward/score_mean",
            "mean score",
            "score",
            "Mean score of the responses of the step, as the reward returned them, before shaping.",
            remedy="It should rise. If it stays flat, read `samples/`, compare `reward/score_std` with "
            "0, and raise `actor.optim.lr`; if it rises while the answers get worse, the reward is being "
            "exploited: raise `algo.kl.coef` or use another reward.",
        ),
        Metric(
            "reward/score_std",
            "spread of scores",
            "score",
            "Standard deviation of the scores over all responses of the step.",
            remedy="0 means that all responses have the same score, and a step without differences teaches "
            "nothing: use a finer reward, easier or harder prompts, or a higher `sampling.temperature`.",
        ),
        Metric("reward/score_min", "lowest score", "score", "Lowest score of the step."),
        Metric("reward/score_max", "highest score", "score", "Highest score of the step."),
        Metric(
            "reward/total_mean",
            "mean return",
            "score",
            "Mean over the responses of all rewards that training sees: the shaped score minus the KL "
            "penalty.",
            remedy="If it falls while `reward/score_mean` rises, the KL penalty outweighs the score: lower "
            "`algo.kl.coef`.",
        ),
        Metric(
            "reward/kl_penalty_mean",
            "KL penalty",
            "score",
            "Mean over the responses of the part of the reward that the KL penalty adds (0 or negative on "
            "average). 0 if `algo.kl.place` is not reward.",
        ),
        Metric(
            "reward/baseline_mean",
            "greedy score",
            "score",
            "Mean shaped score of the greedy responses, the baselines of ReMax.",
        ),
        Metric(
            "reward/clipped_frac",
            "clipped scores",
            "share of responses",
            "Share of the scores that `algo.reward_shaping.clip` changed.",
            healthy=(0.0, 0.1),
            reason="rule of thumb: clipped scores no longer differ, so they teach nothing",
            remedy="Raise `algo.reward_shaping.clip`, or set `algo.reward_shaping.normalize`.",
            percent=True,
        ),
        Metric(
            "reward/missing_eos_frac",
            "without an end token",
            "share of responses",
            "Share of the responses without an end token, to which `algo.reward_shaping.missing_eos` "
            "applies.",
            healthy=(0.0, 0.2),
            reason="rule of thumb, as for `rollout/truncated_frac`",
            remedy="Raise `sampling.max_new_tokens`, or set `algo.reward_shaping.missing_eos`.",
            percent=True,
        ),
        Metric(
            "reward/component/<name>_mean",
            "component",
            "score",
            "Mean of one part of the score, before weighting: a part of reward=weighted, or a component that "
            "a reward reports. `<name>_raw` is a normalized part before normalization.",
            remedy="If the parts move in opposite directions, change their weights in `reward`.",
        ),
    ),
    (
        Panel(
            "Reward",
            "score",
            {"reward/score_mean": "mean ± std over the responses"},
            band="reward/score_std",
            band_limits=("reward/score_min", "reward/score_max"),
            overview=True,
        ),
        Panel(
            "Reward with penalties",
            "score",
            {"reward/total_mean": "score - KL penalty", "reward/kl_penalty_mean": "KL penalty"},
        ),
        Panel("Reward components", "score", {"reward/component/<name>_mean": ""}),
        Panel(
            "Changed scores",
            "share of responses",
            {"reward/clipped_frac": "clipped", "reward/missing_eos_frac": "without an end token"},
            percent=True,
        ),
    ),
)

_KL = Section(
    "KL to the reference",
    "kl",
    (
        Metric(
            "kl/ref_seq_mean",
            "KL per response",
            "nats per response",
            "Mean over the responses of log pi - log pi_ref, summed over the tokens (k1 of Schulman's "
            "[Approximating KL divergence](http://joschu.net/blog/kl-approx.html)), before the update. "
            "Signed: single steps may be below 0.",
            healthy=(None, 10.0),
            reason="[TRL's training FAQ](https://huggingface.co/docs/trl/how_to_train): between 0 and 10; "
            "noise below 0 is usual at the start. A rule of thumb for RLHF with a reward model; long answers "
            "and verifiable rewards may exceed it",
            remedy=f"Above: raise `algo.kl.coef`, {_LOWER_LR}. Below 0 for many steps: generation and "
            "training disagree, see `parity/*`, or `sampling.top_p` and `sampling.top_k` cut the policy.",
        ),
        Metric(
            "kl/ref_token_mean",
            "KL per token",
            "nats per token",
            "Mean over the tokens of log pi - log pi_ref (k1), before the update. Signed: single steps "
            "may be below 0.",
            remedy=f"If it grows without end: raise `algo.kl.coef`, {_LOWER_LR}.",
        ),
        Metric(
            "kl/ref_token_max",
            "largest KL of a token",
            "nats",
            "Largest log pi - log pi_ref of a token.",
            remedy="A value far above that of earlier steps marks a response worth reading in `samples/`.",
        ),
        Metric(
            "kl/k3_token_mean",
            "KL per token, k3",
            "nats per token",
            "Mean over the tokens of the estimator k3 of the KL to the reference, which is never negative. "
            "`health.max_kl` limits it.",
            healthy=(0.0, 1.0),
            reason="rule of thumb; single tokens dominate it: the quickstart, whose responses have 3 tokens, "
            "measures up to 1.3 in single steps",
            remedy=f"Raise `algo.kl.coef`, {_LOWER_LR}, or set `health.max_kl`.",
        ),
        Metric(
            "kl/coef",
            "KL coefficient",
            "",
            "Coefficient of the KL, `algo.kl.coef` or as the controller has set it.",
            remedy="If an adaptive coefficient rises without end, the KL cannot be kept at its target: "
            f"{_LOWER_LR}, or raise `algo.kl.target`.",
        ),
        Metric("kl/target", "target", "nats", "`algo.kl.target`, with an adaptive controller only."),
        Metric(
            "kl/before_update",
            "before the update",
            "nats per token",
            "KL to the reference per token (k1) before the update, with `algo.kl.after_update`.",
        ),
        Metric(
            "kl/after_update",
            "after the update",
            "nats per token",
            "KL to the reference per token (k1) after the update on the same responses, with "
            "`algo.kl.after_update`.",
            remedy=f"Much above `kl/before_update`: the update is too large; {_LOWER_LR}.",
        ),
    ),
    (
        Panel(
            "KL to the reference",
            "nats per response",
            {"kl/ref_seq_mean": "KL", "kl/target": "target"},
            overview=True,
        ),
        Panel("KL per token", "nats per token", {"kl/ref_token_mean": "k1", "kl/k3_token_mean": "k3"}),
        Panel("KL coefficient", "", {"kl/coef": "coefficient"}, from_zero=True),
        Panel(
            "KL before and after the update",
            "nats per token",
            {"kl/before_update": "before", "kl/after_update": "after"},
        ),
    ),
)

_POLICY = Section(
    "Policy",
    "policy",
    (
        Metric(
            "policy/loss",
            "policy loss",
            "loss",
            "Policy loss, averaged over the optimizer steps. Its level says nothing about progress.",
            remedy="Look at `reward/score_mean` and `policy/clipfrac` instead.",
        ),
        Metric(
            "policy/approx_kl",
            "KL of the update",
            "nats per token",
            "KL from the policy that generated the responses to the policy during the update (k3), averaged "
            "over the optimizer steps.",
            healthy=(0.0, 0.1),
            reason="rule of thumb; "
            "[Spinning Up](https://spinningup.openai.com/en/latest/algorithms/ppo.html) aims at 0.01 to 0.05 "
            "in control tasks; measured: 0.001 to 0.002 with SmolLM2, 0.001 to 0.03 in the quickstart",
            remedy=f"{_LOWER_LR.capitalize()}, raise `algo.minibatch_size`, or set "
            "`algo.target_kl` to end the update early.",
        ),
        Metric(
            "policy/kl_k1",
            "KL of the update, k1",
            "nats per token",
            "log pi_old - log pi per token, unclamped: the same KL as `policy/approx_kl` with a noisier "
            "estimator.",
        ),
        Metric(
            "policy/ratio_mean",
            "mean ratio",
            "",
            "Mean of pi / pi_old over the tokens of all optimizer steps.",
            healthy=(0.8, 1.25),
            reason="its expectation is 1; "
            "[TRL](https://huggingface.co/docs/trl/main/en/ppo_trainer): 2 or 0.1 means too drastic an "
            "update",
            remedy=f"{_LOWER_LR.capitalize()}.",
        ),
        Metric(
            "policy/ratio_max",
            "largest ratio",
            "",
            "Largest pi / pi_old of a token in the step.",
            remedy="Single tokens far above 1 are usual; if it grows from step to step, "
            f"{_LOWER_LR}, or set `algo.policy.dual_clip`.",
        ),
        Metric(
            "policy/clipfrac",
            "clipped tokens",
            "share of tokens",
            "Share of the tokens whose gradient the clip (`algo.policy.clip_low`, `clip_high`) sets to 0. "
            "In `cispo`, the clip limits the weight of these tokens, which keep a gradient. In `gmpo`, it "
            "applies to each token's own ratio, before the mean over the response. In `clip_cov` and DPPO, "
            "tokens that the loss leaves out count too.",
            healthy=(0.0, 0.3),
            reason="rule of thumb; measured in the quickstart: 0.004 to 0.12. gspo clips far more than "
            "grpo by design (Zheng et al. 2025: 0.15)",
            remedy=f"Above: {_LOWER_LR}, or raise `algo.minibatch_size`. Always 0 with several optimizer "
            "steps per rollout: the policy hardly moves, raise `actor.optim.lr`.",
            percent=True,
        ),
        Metric(
            "policy/clipfrac_low",
            "tokens at the dual clip",
            "share of tokens",
            "Share of the tokens whose gradient `algo.policy.dual_clip` sets to 0.",
            healthy=(0.0, 0.05),
            reason="rule of thumb: the dual clip is for rare, very large ratios",
            remedy=f"{_LOWER_LR.capitalize()}.",
            percent=True,
        ),
        Metric(
            "policy/off_policy_frac",
            "off-policy tokens",
            "share of tokens",
            "Share of the tokens that `algo.policy.off_policy_limit` excludes from the policy loss; only "
            "with that key.",
            remedy=f"If it is high, {_LOWER_LR}, lower `algo.epochs`, or raise the limit.",
            percent=True,
        ),
        Metric(
            "policy/entropy",
            "entropy",
            "nats per token",
            "Mean entropy of the policy over the response tokens; an estimate, -log pi of the sampled "
            "tokens, unless `algo.entropy.kind=exact`.",
            remedy="If it falls to a few percent of its first value while the score no longer rises, the "
            "policy has collapsed (Cui et al. 2025): raise `algo.policy.clip_high` (DAPO) or "
            "`algo.entropy.coef`, or lower `actor.optim.lr`. If it rises without end, lower "
            "`algo.entropy.coef` or `actor.optim.lr`.",
        ),
        Metric(
            "policy/grad_norm",
            "gradient norm",
            "",
            "Norm of the actor's gradient before clipping, averaged over the optimizer steps. null if a step "
            "was skipped.",
            remedy="Peaks are cut at `actor.optim.grad_clip`. If it grows from step to step, lower "
            "`actor.optim.lr`.",
        ),
        Metric("policy/lr", "learning rate", "", "Learning rate of the actor in the last optimizer step."),
        Metric(
            "policy/kl_loss",
            "KL in the loss",
            "nats per token",
            "KL to the reference in the loss, before its coefficient, with `algo.kl.place=loss`.",
        ),
        Metric(
            "policy/ptx_loss",
            "loss on texts",
            "nats per token",
            "Language-modelling loss on the texts of `data.ptx_path` (PPO-ptx, Ouyang et al. 2022).",
            remedy="If it rises, the model forgets its training texts: raise `algo.ptx.coef`.",
        ),
        Metric(
            "policy/positive_nll",
            "loss on correct responses",
            "nats per token",
            "Mean of -log p over the tokens of the responses with a score above `algo.positive_nll.above`, "
            "before `algo.positive_nll.coef` (VAPO, Yue et al. 2025). 0 if there are none.",
        ),
        Metric(
            "policy/aux_loss",
            "load balancing",
            "",
            "Load-balancing loss of a mixture-of-experts model, before `algo.aux_coef`. It equals the "
            "number of experts per token if tokens are spread evenly.",
        ),
        Metric(
            "policy/epochs_run",
            "epochs run",
            "epochs",
            "Passes over the rollout that the update made; less than `algo.epochs` if `algo.target_kl` ended "
            "it, 0 if the rollout was skipped.",
        ),
        Metric(
            "policy/early_stopped",
            "ended by target_kl",
            "",
            "1 if `algo.target_kl` ended the update early, otherwise 0.",
            remedy=f"If it is 1 in most steps, the updates are too large for the target: {_LOWER_LR}.",
        ),
    ),
    (
        Panel("Policy loss", "loss", {"policy/loss": "loss"}, overview=True),
        Panel("Entropy", "nats per token", {"policy/entropy": "entropy"}, from_zero=True),
        Panel(
            "Clipped tokens",
            "share of tokens",
            {"policy/clipfrac": "clip", "policy/clipfrac_low": "dual clip"},
            from_zero=True,
        ),
        Panel("KL of the update", "nats per token", {"policy/approx_kl": "k3", "policy/kl_k1": "k1"}),
        Panel("Ratio", "pi / pi_old", {"policy/ratio_mean": "mean", "policy/ratio_max": "largest"}),
        Panel(
            "Gradient norm",
            "before clipping",
            {
                "policy/grad_norm": "actor",
                "value/grad_norm": "critic",
                "sft/grad_norm": "model",
                "rm/grad_norm": "reward model",
            },
            from_zero=True,
        ),
        Panel(
            "Learning rate",
            "",
            {"policy/lr": "actor", "value/lr": "critic", "sft/lr": "model", "rm/lr": "reward model"},
            from_zero=True,
        ),
        Panel(
            "Other losses",
            "loss",
            {
                "policy/kl_loss": "KL",
                "policy/ptx_loss": "texts",
                "policy/positive_nll": "correct responses",
                "policy/aux_loss": "load balancing",
            },
        ),
        Panel("Epochs of the update", "epochs", {"policy/epochs_run": "epochs"}, from_zero=True),
    ),
)

_VALUE = Section(
    "Critic",
    "value",
    (
        Metric(
            "value/loss",
            "value loss",
            "loss",
            "Value loss, averaged over the optimizer steps, before `algo.value.coef`.",
            remedy="If it grows without end, lower `critic.optim.lr`.",
        ),
        Metric(
            "value/clipfrac",
            "clipped values",
            "share of tokens",
            "Share of the states whose value loss `algo.value.clip` increases, so that they have no "
            "gradient.",
            healthy=(0.0, 0.3),
            reason="rule of thumb",
            remedy="Raise `algo.value.clip` or set it to null: returns are larger than 1, or the critic "
            "cannot follow.",
            percent=True,
        ),
        Metric(
            "value/explained_var",
            "explained variance",
            "",
            "1 - Var(return - V) / Var(return) during the update: 1 is a perfect critic, 0 one that predicts "
            "the mean, below 0 a critic worse than a constant.",
            healthy=(0.0, 1.0),
            reason="by definition: below 0 the critic adds variance to the advantages; near 0 in the first "
            "steps of a new value head (quickstart: -0.04 at first, 0.25 at the end)",
            remedy="Raise `critic.optim.lr`, set `algo.value.pretrain_rollouts` or "
            "`algo.value.warmup_steps`, or start the critic from a reward model (`critic.model.path`).",
        ),
        Metric("value/mean", "mean value", "score", "Mean of the values during the update."),
        Metric(
            "value/pred_mean",
            "mean value before",
            "score",
            "Mean of the values before the update.",
            remedy="It should follow `value/return_mean`. A gap that stays means that the critic lags behind "
            "or is biased: raise `critic.optim.lr`, or set `algo.value.pretrain_rollouts`.",
        ),
        Metric("value/return_mean", "mean return", "score", "Mean of the returns that the critic learns."),
        Metric("value/return_std", "spread of returns", "score", "Standard deviation of the returns."),
        Metric(
            "value/grad_norm",
            "gradient norm",
            "",
            "Norm of the critic's gradient before clipping, averaged over the optimizer steps. null if a "
            "step was skipped.",
            remedy="If it grows from step to step, lower `critic.optim.lr`.",
        ),
        Metric("value/lr", "learning rate", "", "Learning rate of the critic in the last optimizer step."),
        Metric(
            "value/pretrain_loss",
            "value loss, pretraining",
            "loss",
            "Value loss of the last of `algo.value.pretrain_rollouts`; logged with the first step.",
        ),
        Metric(
            "value/pretrain_explained_var",
            "explained variance, pretraining",
            "",
            "Explained variance in the last of `algo.value.pretrain_rollouts`; logged with the first step.",
            healthy=(0.0, 1.0),
            reason="by definition, as for `value/explained_var`",
            remedy="Raise `algo.value.pretrain_rollouts` or `critic.optim.lr`.",
        ),
    ),
    (
        Panel("Value loss", "loss", {"value/loss": "loss"}, from_zero=True, overview=True),
        Panel("Explained variance", "", {"value/explained_var": "critic"}),
        Panel(
            "Values and returns",
            "score",
            {"value/pred_mean": "mean value", "value/return_mean": "mean return"},
        ),
        Panel("Clipped values", "share of tokens", {"value/clipfrac": "clip"}, from_zero=True),
    ),
)

_ADVANTAGE = Section(
    "Advantages",
    "adv",
    (
        Metric("adv/mean", "mean", "score", "Mean advantage over the tokens, before whitening."),
        Metric(
            "adv/std",
            "spread",
            "score",
            "Standard deviation of the advantages over the tokens, before whitening.",
            remedy="0 means that no token is better than another: the step teaches nothing.",
        ),
        Metric("adv/max_abs", "largest", "score", "Largest absolute advantage, before whitening."),
    ),
    (
        Panel(
            "Advantages",
            "score, before whitening",
            {"adv/mean": "mean", "adv/std": "std", "adv/max_abs": "largest"},
        ),
    ),
)

_ROLLOUT = Section(
    "Rollout",
    "rollout",
    (
        Metric("rollout/prompt_len_mean", "prompt length", "tokens", "Mean length of the prompts."),
        Metric(
            "rollout/resp_len_mean",
            "mean length",
            "tokens",
            "Mean length of the responses, end tokens included.",
            remedy="If it grows while the score does not, set `algo.reward_shaping.length_penalty` or "
            "`overlong_buffer`, or check whether the reward prefers long answers.",
        ),
        Metric("rollout/resp_len_max", "longest", "tokens", "Length of the longest response."),
        Metric(
            "rollout/stop_frac",
            "ended by themselves",
            "share of responses",
            "Share of the responses that ended with a stop token or stop string.",
            healthy=(0.8, 1.0),
            reason="rule of thumb, as for `rollout/truncated_frac`",
            remedy="Raise `sampling.max_new_tokens`, or check `sampling.stop_token_ids` and `sampling.stop`.",
            percent=True,
        ),
        Metric(
            "rollout/truncated_frac",
            "cut",
            "share of responses",
            "Share of the responses that were cut at their limit.",
            healthy=(0.0, 0.2),
            reason="rule of thumb; DAPO (Yu et al. 2025) shows that the scores of cut responses are noise",
            remedy="Raise `sampling.max_new_tokens`, set `algo.reward_shaping.missing_eos` or "
            "`overlong_buffer`, or start from a model that has learned to stop (stage=sft).",
            percent=True,
        ),
        Metric(
            "rollout/empty_frac",
            "empty",
            "share of responses",
            "Share of the responses without a token, or with only an end token.",
            healthy=(0.0, 0.05),
            reason="rule of thumb",
            remedy="Set `sampling.min_new_tokens`, or check the chat template (`data.chat_template`).",
            percent=True,
        ),
        Metric(
            "rollout/pad_frac",
            "padding",
            "share of tokens",
            "Share of padding in the rollout as one rectangle; forwards have less, see "
            "`perf/pad_frac_update`.",
            percent=True,
        ),
        Metric(
            "rollout/unique_frac",
            "different responses",
            "share of responses",
            "Number of different responses of the step, divided by the number of responses.",
            remedy="If it falls towards 0 in a task with long answers, the policy has collapsed: raise "
            "`sampling.temperature` or `algo.entropy.coef`, lower `actor.optim.lr`. Short answers are often "
            "equal (quickstart: 0.2).",
            percent=True,
        ),
        Metric(
            "rollout/zero_std_group_frac",
            "groups without a difference",
            "share of prompts",
            "Share of the prompts whose responses all have the same score, with several responses per "
            "prompt.",
            healthy=(0.0, 0.5),
            reason="rule of thumb; such prompts have no gradient with rloo, grpo and similar estimators, and "
            "their share grows as the task is solved (DAPO, Yu et al. 2025)",
            remedy="Use prompts of another difficulty or a finer reward, raise `rollout.samples_per_prompt` "
            "or `sampling.temperature`, or set `algo.dynamic_sampling.enabled=true`.",
            percent=True,
        ),
        Metric(
            "rollout/rounds",
            "rounds",
            "",
            "Rounds of generation that dynamic sampling needed.",
            remedy="If it stays at `algo.dynamic_sampling.max_rounds`, most prompts are too easy or too "
            "hard.",
        ),
        Metric(
            "rollout/useful_group_frac",
            "useful prompts",
            "share of prompts",
            "Share of the prompts drawn by dynamic sampling whose responses differ in score.",
            healthy=(0.3, 1.0),
            reason="rule of thumb: below it, more than two thirds of the generation is thrown away",
            remedy="Use prompts of another difficulty, or raise `rollout.samples_per_prompt`.",
            percent=True,
        ),
        Metric(
            "rollout/dropped_tokens",
            "dropped tokens",
            "tokens",
            "Tokens of responses that dynamic sampling dropped.",
        ),
        Metric(
            "rollout/greedy_tokens",
            "tokens of greedy responses",
            "tokens",
            "Tokens of the greedy responses that ReMax generates beside the others, one for each prompt.",
        ),
        Metric(
            "rollout/turns_mean",
            "turns",
            "",
            "With an environment: mean number of turns of the policy in a response.",
        ),
        Metric(
            "rollout/feedback_len_mean",
            "feedback",
            "tokens",
            "With an environment: mean number of tokens of its feedback in a response. They are not trained.",
        ),
        Metric(
            "rollout/ended_done_frac",
            "done",
            "share of responses",
            "With an environment: share of the responses that the environment ended.",
            percent=True,
        ),
        Metric(
            "rollout/ended_turns_frac",
            "at the last turn",
            "share of responses",
            "With an environment: share of the responses that took `rollout.environment.max_turns` turns.",
            remedy="Raise `rollout.environment.max_turns` if the task needs more turns.",
            percent=True,
        ),
        Metric(
            "rollout/ended_length_frac",
            "at the length limit",
            "share of responses",
            "With an environment: share of the responses that reached the limit of tokens, in a turn or with "
            "the feedback.",
            remedy="Raise `sampling.max_new_tokens`, which counts feedback too, or shorten the feedback.",
            percent=True,
        ),
        Metric(
            "rollout/ended_error_frac",
            "error",
            "share of responses",
            "Share of the responses that ended because the environment raised an exception or returned no "
            "valid result.",
            healthy=(0.0, 0.01),
            reason="rule of thumb: these responses are incomplete, and their last turn has no reward",
            remedy="Correct the environment; the log has the first error of each rank.",
            percent=True,
        ),
        Metric(
            "rollout/ended_timeout_frac",
            "time-out",
            "share of responses",
            "Share of the responses that ended because a call of the environment exceeded "
            "`rollout.environment.timeout_seconds`.",
            healthy=(0.0, 0.01),
            reason="rule of thumb, as for `rollout/ended_error_frac`",
            remedy="Raise `rollout.environment.timeout_seconds`, or lower `rollout.environment.workers` if "
            "the calls slow one another down.",
            percent=True,
        ),
    ),
    (
        Panel(
            "Response length",
            "tokens",
            {"rollout/resp_len_mean": "mean", "rollout/resp_len_max": "longest"},
            from_zero=True,
            overview=True,
        ),
        Panel(
            "End of responses",
            "share of responses",
            {"rollout/stop_frac": "stopped", "rollout/truncated_frac": "cut", "rollout/empty_frac": "empty"},
            percent=True,
        ),
        Panel(
            "Prompts without a difference in score",
            "share of prompts",
            {"rollout/zero_std_group_frac": "all scores equal"},
            percent=True,
        ),
        Panel(
            "Different responses", "share of responses", {"rollout/unique_frac": "different"}, percent=True
        ),
        Panel("Prompt length", "tokens", {"rollout/prompt_len_mean": "mean"}, from_zero=True),
        Panel(
            "Dynamic sampling",
            "share of prompts",
            {"rollout/useful_group_frac": "useful prompts"},
            percent=True,
        ),
        Panel("Turns of the policy", "turns", {"rollout/turns_mean": "mean"}, from_zero=True),
        Panel("Feedback of the environment", "tokens", {"rollout/feedback_len_mean": "mean"}, from_zero=True),
        Panel(
            "End of episodes",
            "share of responses",
            {
                "rollout/ended_done_frac": "done",
                "rollout/ended_turns_frac": "last turn",
                "rollout/ended_length_frac": "length limit",
                "rollout/ended_error_frac": "error",
                "rollout/ended_timeout_frac": "time-out",
            },
            percent=True,
        ),
    ),
)

_PARITY = Section(
    "Generation against training",
    "parity",
    (
        Metric(
            "parity/logp_abs_diff_mean",
            "mean difference",
            "nats per token",
            "Mean absolute difference between the log-probs of generation and of the training engine; with "
            "`algo.old_logprobs=rollout`, in the first optimizer step.",
            healthy=(0.0, 0.05),
            reason="the tests of [NeMo RL](https://docs.nvidia.com/nemo/rl/latest/adding-new-models.html) "
            "require a mean of exp of the difference below 1.05 to 1.1; measured on the CPU: 2e-7 in fp32. "
            "The check at start-up refuses more than 1e-3 in fp32, 0.02 in fp16 and 0.1 in bf16, and "
            "`health.max_parity` ends the run if a step exceeds this",
            remedy="A sudden rise: the weights of the decode backend are stale. Otherwise set "
            "`algo.rollout_is.kind`, use `rollout.backend=hf`, or a wider `actor.model.dtype`.",
        ),
        Metric(
            "parity/logp_abs_diff_max",
            "largest difference",
            "nats",
            "Largest of these differences.",
            remedy="Single tokens may differ by 1 and more in bf16; look at the mean.",
        ),
        Metric(
            "parity/ratio_first_minibatch_max",
            "first ratio",
            "",
            "Largest pi / pi_old in the first optimizer step of the update, which is 1 unless the forward of "
            "the update differs from that of the old log-probs.",
            healthy=(0.9, 1.1),
            reason="by definition 1, up to rounding (fp32 on the CPU: 1.0000); with `algo.old_policy=lagged` "
            "the old policy is another one, and with `algo.old_logprobs=rollout` the ratio contains the "
            "difference between generation and training: the range does not apply",
            remedy="Switch off dropout and other randomness of the model, or use a wider "
            "`actor.model.dtype`.",
        ),
        Metric(
            "parity/weight_mean",
            "importance weight",
            "",
            "Mean importance weight of the tokens, with `algo.rollout_is`.",
            healthy=(0.9, 1.1),
            reason="its expectation is 1 without truncation; rule of thumb",
            remedy="Generation differs from training: see `parity/logp_abs_diff_mean`.",
        ),
        Metric(
            "parity/weight_outside_frac",
            "weights outside the bounds",
            "share of tokens",
            "Share of the tokens whose importance weight, or whose response's, is outside "
            "`algo.rollout_is.low` and `algo.rollout_is.high`, and is truncated or masked.",
            healthy=(0.0, 0.1),
            reason="rule of thumb",
            remedy="Generation differs from training: see `parity/logp_abs_diff_mean`. The product of a "
            "long response leaves any bounds: use `algo.rollout_is.level=sequence_mean` or `token`.",
            percent=True,
        ),
        Metric(
            "parity/k3_token_mean",
            "KL of generation to training",
            "nats per token",
            "Mean over the tokens of the estimator k3 of the KL of the decode backend's distribution to the "
            "training engine's, with `algo.rollout_is`.",
            remedy="See `parity/logp_abs_diff_mean`.",
        ),
    ),
    (
        Panel(
            "Difference of log-probs",
            "nats per token",
            {"parity/logp_abs_diff_mean": "mean", "parity/logp_abs_diff_max": "largest"},
        ),
        Panel("Ratio of the first minibatch", "pi / pi_old", {"parity/ratio_first_minibatch_max": "largest"}),
        Panel("Importance weight", "", {"parity/weight_mean": "mean"}),
        Panel(
            "Importance weights outside the bounds",
            "share of tokens",
            {"parity/weight_outside_frac": "outside"},
            percent=True,
        ),
        Panel("KL of generation to training", "nats per token", {"parity/k3_token_mean": "k3"}),
    ),
)

_SFT = Section(
    "Supervised fine-tuning",
    "sft",
    (
        Metric(
            "sft/loss",
            "training loss",
            "nats per token",
            "Loss of the step over the learned tokens, label smoothing included.",
            remedy="If it rises, lower `actor.optim.lr`; if it does not fall, raise it.",
        ),
        Metric(
            "sft/nll",
            "negative log-likelihood",
            "nats per token",
            "Loss without label smoothing, with `sft.label_smoothing`.",
        ),
        Metric(
            "sft/token_accuracy",
            "token accuracy",
            "share of tokens",
            "Share of the learned tokens to which the model gives the highest probability.",
            remedy="It should rise as `sft/loss` falls; its level depends on the texts. If it rises while "
            "`eval/token_accuracy` falls, the model learns its training texts by heart: fewer epochs, or a "
            "lower `actor.optim.lr`. If it stays flat, raise `actor.optim.lr`.",
            percent=True,
        ),
        Metric(
            "sft/aux_loss",
            "load balancing",
            "",
            "Load-balancing loss of a mixture-of-experts model, before its coefficient.",
        ),
        Metric("sft/tokens", "learned tokens", "tokens", "Learned tokens of the step, over all ranks."),
        Metric(
            "sft/learned_frac",
            "learned tokens",
            "share of tokens",
            "Share of the tokens of the step that are learned; prompts and other messages are not.",
            healthy=(0.05, 1.0),
            reason="rule of thumb: below it, most of the computation teaches nothing",
            remedy="Check `sft.learn` and the data; shorten prompts with `sft.max_tokens`.",
            percent=True,
        ),
        Metric("sft/epoch", "epoch", "epochs", "Passes over the data so far."),
        Metric(
            "sft/grad_norm",
            "gradient norm",
            "",
            "Norm of the gradient before clipping. null if the step was skipped.",
            remedy="If it grows from step to step, lower `actor.optim.lr`.",
        ),
        Metric("sft/lr", "learning rate", "", "Learning rate of the step."),
    ),
    (
        Panel("Loss", "nats per token", {"sft/loss": "training", "eval/loss": "held out"}, overview=True),
        Panel(
            "Token accuracy",
            "share of correct tokens",
            {"sft/token_accuracy": "training", "eval/token_accuracy": "held out"},
            percent=True,
            overview=True,
        ),
    ),
)

_REWARD_MODEL = Section(
    "Reward model",
    "rm",
    (
        Metric(
            "rm/loss",
            "training loss",
            "nats per pair",
            "Pairwise loss of the step; log 2 = 0.69 is chance.",
            remedy="If it stays at 0.69, raise `scorer.optim.lr` or check the labels of the pairs.",
        ),
        Metric(
            "rm/accuracy",
            "pair accuracy",
            "share of pairs",
            "Share of the pairs of the step whose preferred text has the higher score; a tie counts half.",
            healthy=(0.5, 1.0),
            reason="0.5 is chance; on human preferences 0.6 to 0.75 is usual, since people themselves agree "
            "on no more than that share of the pairs (Ouyang et al. 2022: 0.73)",
            remedy="Raise `scorer.optim.lr`, or check which text of the pairs is preferred. Near 1 on "
            "training pairs with a lower `eval/accuracy`: fewer epochs.",
            percent=True,
        ),
        Metric(
            "rm/margin_mean",
            "margin",
            "score",
            "Mean score of the preferred minus score of the rejected text.",
            remedy="If it grows while `eval/accuracy` does not, the model gets overconfident: fewer epochs, "
            "or `reward_model.label_smoothing`.",
        ),
        Metric(
            "rm/score_mean",
            "mean score",
            "score",
            "Mean score of all texts, which the loss leaves open.",
            remedy="If it drifts far from 0, set `reward_model.centering`.",
        ),
        Metric("rm/text_len_mean", "text length", "tokens", "Mean length of the texts."),
        Metric("rm/epoch", "epoch", "epochs", "Passes over the pairs so far."),
        Metric(
            "rm/grad_norm",
            "gradient norm",
            "",
            "Norm of the gradient before clipping. null if the step was skipped.",
            remedy="If it grows from step to step, lower `scorer.optim.lr`.",
        ),
        Metric("rm/lr", "learning rate", "", "Learning rate of the step."),
    ),
    (
        Panel(
            "Pairwise loss", "nats per pair", {"rm/loss": "training", "eval/loss": "held out"}, overview=True
        ),
        Panel(
            "Pair accuracy",
            "share of pairs",
            {"rm/accuracy": "training", "eval/accuracy": "held out"},
            percent=True,
            overview=True,
        ),
        Panel(
            "Margin",
            "score of chosen - rejected",
            {"rm/margin_mean": "training, mean", "eval/margin_mean": "held out, mean"},
            overview=True,
        ),
        Panel("Mean score", "score", {"rm/score_mean": "training"}),
    ),
)

_EVAL = Section(
    "Held-out data",
    "eval",
    (
        Metric(
            "eval/score_mean",
            "held-out score",
            "score",
            "stage=ppo: mean score of the responses to the held-out prompts. stage=reward_model: mean score "
            "of the held-out texts.",
            remedy="If it falls while `reward/score_mean` rises, the policy overfits the training prompts: "
            "fewer steps, more prompts, or `checkpoint.keep_best=true`.",
        ),
        Metric("eval/score_std", "spread of scores", "score", "Standard deviation of the held-out scores."),
        Metric(
            "eval/accuracy",
            "accuracy",
            "share",
            "stage=ppo: share of the held-out responses with a score above `eval.correct_above`. "
            "stage=reward_model: share of the held-out pairs whose preferred text has the higher score; a "
            "tie counts half.",
            remedy="stage=ppo: it should rise; if it falls while `reward/score_mean` rises, the policy "
            "overfits the training prompts or exploits the reward. stage=reward_model: 0.5 is chance, and "
            "0.6 to 0.75 is usual on human preferences (see `rm/accuracy`). Near 0.5: raise "
            "`scorer.optim.lr` or add pairs; below it: check which text of the pairs is preferred; far below "
            "`rm/accuracy`: fewer epochs.",
            percent=True,
        ),
        Metric("eval/resp_len_mean", "response length", "tokens", "Mean length of the held-out responses."),
        Metric(
            "eval/stop_frac",
            "ended by themselves",
            "share of responses",
            "Share of the held-out responses that ended with a stop token or stop string.",
            healthy=(0.8, 1.0),
            reason="rule of thumb, as for `rollout/truncated_frac`",
            remedy="Raise `sampling.max_new_tokens`.",
            percent=True,
        ),
        Metric(
            "eval/win_rate_vs_ref",
            "wins against the reference",
            "share of prompts",
            "Share of the held-out prompts on which the response has a higher score than the reference's; a "
            "tie counts half, and equal responses are ties.",
            healthy=(0.5, 1.0),
            reason="by definition: below 0.5 the reference is better",
            remedy="Lower `actor.optim.lr`, or raise `algo.kl.coef`.",
            percent=True,
        ),
        Metric(
            "eval/<name>_mean",
            "held-out score",
            "score",
            "Mean score of the held-out responses by the reward `<name>` of `eval.rewards`.",
        ),
        Metric(
            "eval/loss",
            "held-out loss",
            "nats",
            "stage=sft: loss per token on held-out rows. stage=reward_model: loss per held-out pair.",
            remedy="If it rises while the training loss falls, the model overfits: fewer epochs, or a lower "
            "learning rate.",
        ),
        Metric(
            "eval/perplexity",
            "perplexity",
            "",
            "exp of `eval/loss` (stage=sft).",
            remedy="As for `eval/loss`.",
        ),
        Metric(
            "eval/token_accuracy",
            "token accuracy",
            "share of tokens",
            "Share of the learned tokens of held-out rows to which the model gives the highest probability.",
            remedy="As for `eval/loss`: if it falls while `sft/token_accuracy` rises, the model overfits.",
            percent=True,
        ),
        Metric(
            "eval/accuracy/<subset>",
            "accuracy of a subset",
            "share of pairs",
            "Accuracy on the held-out pairs of one subset.",
            healthy=(0.5, 1.0),
            reason="0.5 is chance",
            remedy="Add training pairs like those of the subset.",
            percent=True,
        ),
        Metric(
            "eval/ties",
            "ties",
            "share of pairs",
            "Share of the held-out pairs with equal scores.",
            healthy=(0.0, 0.05),
            reason="rule of thumb; ties usually come from texts that are equal after truncation",
            remedy="Raise `reward_model.max_tokens`.",
            percent=True,
        ),
        Metric(
            "eval/margin_mean",
            "margin",
            "score",
            "Mean score of preferred - rejected, held out.",
            remedy="It should be above 0. If it stays flat while `rm/margin_mean` grows, the model overfits: "
            "fewer epochs.",
        ),
        Metric("eval/margin_std", "spread of margins", "score", "Standard deviation of the margins."),
        Metric(
            "eval/margin_p<percent>",
            "margin, percentile",
            "score",
            "Percentile of the margins: 10, 50 (the median) and 90.",
        ),
        Metric(
            "eval/calibration_error",
            "calibration error",
            "share of pairs",
            "Mean difference between the confidence and the accuracy of the reward model, over bins of equal "
            "width.",
            healthy=(0.0, 0.1),
            reason="rule of thumb",
            remedy="Set `reward_model.label_smoothing`, or train fewer epochs.",
        ),
        Metric(
            "eval/length_corr",
            "correlation with length",
            "",
            "Correlation of the held-out scores with the lengths of the texts.",
            healthy=(-0.4, 0.4),
            reason="rule of thumb; a reward model that mostly measures length makes PPO write longer answers "
            "(Singhal et al. 2023)",
            remedy="Balance the lengths of preferred and rejected texts in the data.",
        ),
    ),
    (
        Panel(
            "Held-out accuracy",
            "share of correct responses",
            {"eval/accuracy": "accuracy"},
            percent=True,
            overview=True,
        ),
        Panel(
            "Held-out score",
            "score",
            {"eval/score_mean": "mean ± std over the responses"},
            band="eval/score_std",
            band_limits=("reward/score_min", "reward/score_max"),
            overview=True,
        ),
        Panel(
            "Wins against the reference", "share of prompts", {"eval/win_rate_vs_ref": "wins"}, percent=True
        ),
        Panel("Other held-out scores", "score", {"eval/<name>_mean": ""}),
        Panel("Held-out response length", "tokens", {"eval/resp_len_mean": "mean"}, from_zero=True),
        Panel(
            "Held-out responses that stop", "share of responses", {"eval/stop_frac": "stopped"}, percent=True
        ),
        Panel("Perplexity", "", {"eval/perplexity": "held out"}),
        Panel("Accuracy of subsets", "share of pairs", {"eval/accuracy/<subset>": ""}, percent=True),
        Panel("Calibration error", "", {"eval/calibration_error": "held out"}, from_zero=True),
        Panel("Correlation of score and length", "", {"eval/length_corr": "held out"}),
        Panel(
            "Percentiles of the margin",
            "score of chosen - rejected",
            {"eval/margin_p10": "10 %", "eval/margin_p50": "median", "eval/margin_p90": "90 %"},
        ),
    ),
)

_PERFORMANCE = Section(
    "Speed",
    "perf",
    (
        Metric(
            "perf/tokens_per_s",
            "tokens per second",
            "tokens/s",
            "Tokens of prompts and responses per second of the step, over all ranks, without padding.",
            remedy="It should stay about level while lengths do. If it falls, `time/*` shows which phase has "
            "grown, and docs/performance.md what to change.",
        ),
        Metric(
            "perf/tokens_per_s_gpu",
            "tokens per second and rank",
            "tokens/s",
            "`perf/tokens_per_s` divided by the number of ranks.",
            remedy="For comparing runs with different numbers of ranks. Much lower with more ranks: "
            "communication or a slow rank, see `health/rank_time_spread_s`.",
        ),
        Metric(
            "perf/samples_per_s",
            "samples per second",
            "samples/s",
            "Samples per second of the step.",
            remedy="If it falls while `perf/tokens_per_s` does not, the responses have become longer.",
        ),
        Metric(
            "perf/gen_tokens_per_s",
            "generated per second",
            "tokens/s",
            "Generated tokens per second of generation, over all ranks.",
            remedy="If generation takes most of the step, raise `memory.rollout_tokens`, or see "
            "docs/performance.md.",
        ),
        Metric(
            "perf/mfu_actor",
            "use of the actor's update",
            "share of the peak",
            "FLOPs that the actor's update needs at least, per second of the update, as a share of the peak "
            "that the run measured at its start (model FLOPs utilization).",
            remedy="Raise `memory.train_tokens`, or see docs/performance.md.",
            percent=True,
        ),
        Metric(
            "perf/mfu_critic",
            "use of the critic's update",
            "share of the peak",
            "As `perf/mfu_actor`, for the critic.",
            remedy="As for `perf/mfu_actor`.",
            percent=True,
        ),
        Metric(
            "perf/mfu_scorer",
            "use of the update",
            "share of the peak",
            "As `perf/mfu_actor`, for the reward model (stage=reward_model).",
            remedy="As for `perf/mfu_actor`.",
            percent=True,
        ),
        Metric(
            "perf/hbm_frac_decode",
            "use of the memory bandwidth",
            "share of the peak",
            "Bytes that generation must read at least, per second of generation, as a share of the memory "
            "bandwidth that the run measured at its start.",
            remedy="If it is low, too few responses are generated at a time: raise `memory.rollout_tokens`.",
            percent=True,
        ),
        Metric(
            "perf/pad_frac_update",
            "padding",
            "share of tokens",
            "Share of padding in the forwards of the update.",
            healthy=(0.0, 0.3),
            reason="rule of thumb",
            remedy="Set `memory.layout=packed` where the model supports it, or raise `memory.train_tokens`.",
            percent=True,
        ),
        Metric(
            "perf/switch_gb",
            "moved weights",
            "GiB",
            "GiB that rank 0 gathered or moved to and from the CPU to switch between training and "
            "generation.",
            remedy="If `time/switch` is large, see `actor.zero.generation_gather` and "
            "`actor.zero.offload_states`.",
        ),
    ),
    (
        Panel("Tokens per second", "tokens/s", {"perf/tokens_per_s": "all phases"}, from_zero=True),
        Panel(
            "Generated tokens per second", "tokens/s", {"perf/gen_tokens_per_s": "generation"}, from_zero=True
        ),
        Panel(
            "Use of the hardware",
            "share of the peak",
            {
                "perf/mfu_actor": "actor's update",
                "perf/mfu_critic": "critic's update",
                "perf/mfu_scorer": "update",
                "perf/hbm_frac_decode": "memory bandwidth of generation",
            },
            from_zero=True,
        ),
        Panel(
            "Padding of the update", "share of tokens", {"perf/pad_frac_update": "padding"}, from_zero=True
        ),
    ),
)

_TIME = Section(
    "Time",
    "time",
    (
        Metric("time/generate", "generation", "s", "Generation of the responses."),
        Metric(
            "time/reward",
            "reward",
            "s",
            "Scoring, and waiting for scores that are computed in the background.",
            remedy="If it is large, raise the concurrency of the reward or `memory.score_tokens`.",
        ),
        Metric(
            "time/old_logprobs",
            "old log-probs",
            "s",
            "Log-probs of the actor before the update, and after it with `algo.kl.after_update`.",
        ),
        Metric("time/ref_logprobs", "reference", "s", "Log-probs of the reference."),
        Metric("time/values", "values", "s", "Values of the critic before the update."),
        Metric("time/advantages", "advantages", "s", "Shaping of rewards, advantages and whitening."),
        Metric(
            "time/update_actor",
            "update of the actor",
            "s",
            "Forwards, backwards and optimizer steps of the actor.",
        ),
        Metric("time/update_critic", "update of the critic", "s", "The same for the critic."),
        Metric("time/update_scorer", "update", "s", "The same for the reward model (stage=reward_model)."),
        Metric(
            "time/switch",
            "switch",
            "s",
            "Switching between training and generation: gathering and moving weights.",
            remedy="See `actor.zero.generation_gather` and `actor.zero.offload_states`.",
        ),
        Metric("time/data", "data", "s", "Reading and tokenizing pairs (stage=reward_model)."),
        Metric(
            "time/eval",
            "evaluation",
            "s",
            "Evaluation on held-out data.",
            remedy="Raise `eval.every`, or lower `eval.max_prompts`.",
        ),
        Metric(
            "time/checkpoint",
            "checkpoint",
            "s",
            "Saving of a checkpoint. It is part of the next step's time, since it comes after the log.",
            remedy="Raise `checkpoint.minutes` or `checkpoint.every`.",
        ),
        Metric("time/other", "other", "s", "The rest of the step, outside all phases."),
        Metric("time/step", "step", "s", "Duration of the step: the sum of all phases and `time/other`."),
    ),
    (
        Panel(
            "Phases of a step",
            "seconds",
            {
                "time/generate": "generation",
                "time/reward": "reward",
                "time/old_logprobs": "old log-probs",
                "time/ref_logprobs": "reference",
                "time/values": "values",
                "time/advantages": "advantages",
                "time/update_actor": "update of the actor",
                "time/update_critic": "update of the critic",
                "time/update_scorer": "update",
                "time/switch": "switch",
                "time/data": "data",
                "time/eval": "evaluation",
                "time/checkpoint": "checkpoint",
                "time/other": "other",
            },
            stacked=True,
        ),
    ),
)

_MEMORY = Section(
    "Memory",
    "mem",
    (
        Metric(
            "mem/alloc_peak_gb",
            "allocated on the GPU",
            "GiB",
            "Peak memory of tensors on a GPU since the start, the largest over ranks. Not tried on a GPU.",
            remedy="Lower `memory.train_tokens`, `memory.score_tokens` or `memory.rollout_tokens`; see "
            "launch/doctor.py.",
        ),
        Metric(
            "mem/reserved_peak_gb",
            "reserved on the GPU",
            "GiB",
            "Peak memory that PyTorch reserved on a GPU since the start, the largest over ranks. Not "
            "tried on a GPU.",
            remedy="As for `mem/alloc_peak_gb`.",
        ),
        Metric(
            "mem/host_rss_gb",
            "resident on the host",
            "GiB",
            "Peak resident memory of a process since the start, the largest over ranks.",
            remedy="If it grows during the whole run, something leaks: check the reward function.",
        ),
    ),
    (
        Panel(
            "Peak memory",
            "GiB",
            {
                "mem/alloc_peak_gb": "allocated on the GPU",
                "mem/reserved_peak_gb": "reserved on the GPU",
                "mem/host_rss_gb": "resident on the host",
            },
            from_zero=True,
        ),
    ),
)

_HEALTH = Section(
    "Health",
    "health",
    (
        Metric(
            "health/nonfinite",
            "non-finite metrics",
            "",
            "Number of metrics of the step that are not finite; they are null in metrics.jsonl.",
            healthy=(0.0, 0.0),
            reason="by definition",
            remedy="See `health/skipped_steps`, and the warnings on the console for the origin.",
        ),
        Metric(
            "health/skipped_steps",
            "skipped optimizer steps",
            "",
            "Optimizer steps of the step that were skipped because a loss, a gradient or a score was not "
            "finite.",
            healthy=(0.0, 0.0),
            reason="by definition; with fp16 a few at the start are normal, while the loss scale adapts",
            remedy="Read the warning, which names the origin; use bf16 instead of fp16, or lower "
            "`actor.optim.lr`. `health.max_skips` limits them.",
        ),
        Metric(
            "health/loss_scale",
            "loss scale",
            "",
            "Loss scale of fp16; 1 in other dtypes.",
            remedy="If it falls step by step, gradients overflow: use bf16.",
        ),
        Metric(
            "health/rollbacks",
            "rollbacks",
            "",
            "How often the run went back to its last checkpoint.",
            healthy=(0.0, 0.0),
            reason="by definition",
            remedy="See the event in events.jsonl and `dumps/`.",
        ),
        Metric(
            "health/rank_time_spread_s",
            "spread of ranks",
            "s",
            "Longest minus shortest busy time of the ranks in the step. A permanently large spread indicates "
            "a slow rank.",
            remedy="Check the machine of the slowest rank, and whether lengths differ much between ranks.",
        ),
    ),
    (
        Panel(
            "Skipped steps and non-finite metrics",
            "number",
            {"health/skipped_steps": "skipped optimizer steps", "health/nonfinite": "non-finite metrics"},
            from_zero=True,
        ),
        Panel("Spread of ranks", "seconds", {"health/rank_time_spread_s": "spread"}, from_zero=True),
        Panel("Loss scale", "", {"health/loss_scale": "loss scale"}, from_zero=True),
    ),
)

_PROGRESS = Section(
    "Progress",
    "",
    (
        Metric("step", "step", "steps", "Number of the step."),
        Metric("episodes", "samples", "samples", "Samples of all steps so far."),
        Metric(
            "tokens",
            "tokens",
            "tokens",
            "Trained tokens of all steps so far; for stage=ppo the response tokens.",
        ),
        Metric("time", "time", "s", "Seconds since the start of the run, earlier processes included."),
    ),
)

# in the order of importance in a report
SECTIONS: tuple[Section, ...] = (
    _REWARD,
    _SFT,
    _REWARD_MODEL,
    _EVAL,
    _KL,
    _POLICY,
    _VALUE,
    _ADVANTAGE,
    _ROLLOUT,
    _PARITY,
    _PERFORMANCE,
    _TIME,
    _MEMORY,
    _HEALTH,
    _PROGRESS,
)
PANELS: tuple[Panel, ...] = tuple(panel for section in SECTIONS for panel in section.panels)
METRICS: dict[str, Metric] = {metric.name: metric for section in SECTIONS for metric in section.metrics}


def find(name: str) -> Metric | None:
    """Returns the metric or the family of metrics called ``name``, or None."""
    if name in METRICS:
        return METRICS[name]
    return next((metric for metric in METRICS.values() if matches(metric.name, name)), None)


def matches(pattern: str, name: str) -> bool:
    """Returns whether ``name`` is ``pattern`` or a metric of the family ``pattern``."""
    return re.fullmatch(re.sub(r"<\w+>", ".+", re.escape(pattern)), name) is not None


def panel_metrics(panel: Panel, names: Iterable[str]) -> dict[str, str]:
    """Returns the metrics of a panel that are among ``names``, with their labels, in the order of the panel.

    The label of a metric of a family is the variable part of its name.
    """
    found: dict[str, str] = {}
    for pattern, label in panel.metrics.items():
        before, _, after = pattern.partition("<")
        after = after.partition(">")[2]
        for name in names:
            if name == pattern:
                found[name] = label
            elif "<" in pattern and name not in METRICS and matches(pattern, name):
                found[name] = name.removeprefix(before).removesuffix(after)
    return found


def overview_panels(names: Container[str]) -> list[Panel]:
    """Returns the panels of the overview that have data: those whose first metric is in ``names``.

    Of panels that show the same information, the one with the better scale is returned.
    """
    panels = [panel for panel in PANELS if panel.overview and next(iter(panel.metrics)) in names]
    if "eval/accuracy" in names:  # shows the same information as the score, on a better scale
        panels = [panel for panel in panels if panel.title != "Held-out score"]
    if "rm/accuracy" in names:  # its panel shows the held-out accuracy too
        panels = [panel for panel in panels if panel.title != "Held-out accuracy"]
    return panels


def plain(text: str) -> str:
    """Returns a text of the catalogue without the marks of Markdown."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).replace("`", "")


def outside(metric: Metric, value: float) -> bool:
    """Returns whether ``value`` is outside the healthy range of ``metric``."""
    low, high = metric.healthy or (None, None)
    return (low is not None and value < low) or (high is not None and value > high)
