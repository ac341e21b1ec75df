"""Every setting of a run: its name, type, range and default, each written once, here.

`from_tree` makes a Config from a plain nested dict, `problems` looks for what does not fit together, `inherit` fills in what follows from other
keys. The open parts (`reward`, `prepare`) are a `_target_` and its keyword arguments; build.py checks those against the callable's signature.
Batch sizes are global: they mean the same with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ppo_ds.config.typed import Count, Fraction, Natural, NonNegative, Positive, read

Dtype = Literal["bf16", "fp16", "fp32"]


def _required(how: str) -> Any:
    """A key without a default, and what to write to give it one."""
    return field(metadata={"how": how})


def _empty() -> Any:
    return field(default_factory=dict)


@dataclass
class RunConfig:
    name: str = "ppo"
    dir: str | None = None  # where everything is written; null: outputs/<name>
    seed: Natural = 0
    steps: Count | None = None  # PPO steps (one rollout each); or:
    epochs: Positive | None = (
        None  # passes over the prompts (of a mixture: as many prompts as its sets hold together)
    )
    resume: str = "auto"  # auto: continue or start; never: refuse a used directory; else a checkpoint folder
    resume_allow_changes: list[str] = field(
        default_factory=list
    )  # keys that may differ from those of the checkpoint, though the result does too then
    dry_run: bool = (
        False  # the same loop for two steps on the CPU, with tiny random models of the same architectures
    )
    stop_at_step: Count | None = None  # stop early, with the schedules of the whole run
    max_minutes: Positive | None = None  # save and stop after so long
    threads: Count | None = None  # of each rank, on its CPU; null: the machine's cores divided by its ranks
    timeout_minutes: Positive = 30.0  # a phase without a sign of life for so long is a hang
    verbose: bool = False  # let the libraries talk


@dataclass
class ModelConfig:
    path: str = _required("a Hub id or a model folder")
    revision: str | None = None  # of a Hub id
    dtype: Dtype = "bf16"
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    attn_implementation: str = "sdpa"


@dataclass
class InheritedModelConfig:
    """A model whose null fields are the actor's."""

    path: str | None = None
    revision: str | None = None
    dtype: Dtype | None = None
    trust_remote_code: bool | None = None
    gradient_checkpointing: bool | None = None
    attn_implementation: str | None = None


@dataclass
class ZeroConfig:
    stage: Literal[0, 1, 2, 3] = 2
    offload_optimizer: bool = False  # to the CPU; stages 1-3
    offload_params: bool = False  # to the CPU; stage 3


@dataclass
class ActorZeroConfig(ZeroConfig):
    generation_gather: Literal["auto", "whole", "layers"] = (
        "auto"  # stage 3: weights gathered once for a generation phase, or layer by layer in each forward
    )
    offload_states: Literal["auto", "always", "never"] = (
        "auto"  # optimizer states to the CPU while generating; auto: where room is short
    )


@dataclass
class FrozenZeroConfig:
    stage: Literal[0, 3] = 0  # 0: a replica on each rank; 3: sharded
    offload_params: bool = False  # to the CPU


@dataclass
class OptimConfig:
    """AdamW. The schedule runs over the true number of optimizer steps."""

    lr: Positive = 1e-6
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0  # not on norms and biases
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: Fraction = 0.03  # of all optimizer steps
    min_lr_ratio: Fraction = 0.1  # where cosine and linear end, of lr
    grad_clip: NonNegative = 1.0  # global norm; 0: off


@dataclass
class CriticOptimConfig(OptimConfig):
    lr: Positive = 5e-6


@dataclass
class LoraConfig:
    """Low-rank adapters on frozen weights (Hu et al. 2021)."""

    rank: Natural = 0  # 0: off, all weights are trained
    alpha: Positive | None = None  # the update is alpha / rank times B A; null: 2 x rank
    targets: list[str] | None = (
        None  # names of the linear layers to adapt (q_proj, ...); null: all but the head
    )
    lr: Positive | None = None  # of the adapters; null: optim.lr


@dataclass
class EmaConfig:
    """A running average of the weights, in fp32, over optimizer steps."""

    decay: Fraction | None = None  # null: none is kept; else it is written to model_ema/ too
    evaluate: bool = False  # evaluation (and so the best checkpoint) goes by the average


@dataclass
class ActorConfig:
    model: ModelConfig
    zero: ActorZeroConfig
    optim: OptimConfig
    lora: LoraConfig
    ema: EmaConfig
    deepspeed: dict[str, Any] = _empty()  # raw DeepSpeed JSON, merged last


@dataclass
class CriticConfig:
    model: InheritedModelConfig  # path: only with init=path
    zero: ZeroConfig
    optim: CriticOptimConfig
    lora: LoraConfig
    init: Literal["auto", "reward", "actor", "path"] = (
        "auto"  # auto: the reward model if it is a decoder with the actor's tokenizer, else the actor
    )
    share_trunk: bool = False  # a value head on the actor instead of a model of its own; optim, zero and lora are then the actor's
    deepspeed: dict[str, Any] = _empty()


@dataclass
class ReferenceConfig:
    model: InheritedModelConfig
    zero: FrozenZeroConfig


@dataclass
class RolloutConfig:
    prompts_per_step: Count = _required("the prompts of one PPO step, over all ranks")
    samples_per_prompt: Count = 1
    backend: Literal["auto", "static", "hf"] = "auto"  # what decodes; auto: static where it can, else hf


@dataclass
class SamplingConfig:
    max_new_tokens: Count = _required("the longest answer, in tokens")
    min_new_tokens: Natural = 0
    temperature: Positive = 1.0  # log-probs are taken at the same temperature
    top_p: Fraction = 1.0
    top_k: Natural = 0  # 0: off; 1: greedy
    stop_token_ids: list[Natural] | None = None  # null: the model's own end tokens; []: never stop early
    stop: list[str] = field(default_factory=list)  # texts that end an answer


@dataclass
class MixtureConfig:
    """One of several data sets; null fields are those of ``data``."""

    path: str
    weight: Positive = 1.0  # its share of the prompts, relative to the others
    split: str | None = None
    revision: str | None = None
    prompt_column: str | None = None


@dataclass
class DataConfig:
    path: str | None = None  # a Hub data set or a JSONL, JSON, Parquet or CSV file of prompts; or:
    mix: list[MixtureConfig] = field(default_factory=list)  # several of them, mixed by weight
    split: str = "train"  # of a Hub data set
    revision: str | None = None  # of a Hub data set
    prompt_column: str | None = None  # null: prompt, messages or conversations, whichever is there
    system: str | None = None  # a system message put before each chat that has none
    apply_chat_template: bool | None = (
        None  # a text is a user's message, for the chat template; null: where the tokenizer has one; false: as it is
    )
    max_samples: Count | None = None  # of each set where there are several
    max_prompt_tokens: Count = 512
    long_prompts: Literal["truncate_left", "drop"] = "truncate_left"
    eval_path: str | None = None  # held-out prompts
    eval_split: str = "test"  # of a Hub data set
    shuffle: bool = True
    ptx_path: str | None = None  # texts or demonstrations for algo.ptx
    ptx_split: str = "train"  # of a Hub data set
    ptx_max_tokens: Count = 512  # longer ones are cut on the right
    chat_template: str | None = None  # a Jinja file or text, instead of the tokenizer's
    chat_template_kwargs: dict[str, Any] = _empty()


@dataclass
class KLConfig:
    place: Literal["reward", "loss", "none"] = "reward"
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k1"
    coef: NonNegative = 0.05
    controller: Literal["fixed", "adaptive", "threshold"] = "fixed"
    target: Positive = 6.0  # nats that adaptive and threshold steer to, per `unit`
    horizon: Positive = 10000.0  # samples in which adaptive changes the coefficient by a fifth at most, about
    unit: Literal["sequence", "token"] = "sequence"
    min_coef: NonNegative = 0.0
    max_coef: Positive | None = None
    after_update: bool = False  # measure the KL to the reference again after each update (one more forward)


@dataclass
class GAEConfig:
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    lam_critic: Fraction | None = None  # for the returns; null: lam
    bootstrap_truncated: bool = (
        False  # an answer cut at the length limit is worth V of its last state on top, not 0
    )


@dataclass
class AdvantageConfig:
    estimator: Literal["gae", "reinforce", "rloo", "grpo", "dr_grpo", "opo"] = (
        "gae"  # gae alone has a critic; at action level sequence it is score - V
    )
    whiten: Literal["batch", "none", "group", "minibatch"] = (
        "batch"  # masked, over all ranks; group: the answers to one prompt
    )
    unbiased: bool = False  # variance over n - 1


@dataclass
class PolicyConfig:
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    clip_low: Positive = 0.2
    clip_high: Positive | None = None  # null: clip_low
    dual_clip: Positive | None = None  # above 1; null: off


@dataclass
class ValueConfig:
    position: Literal["token", "prompt_last", "response_last"] | None = (
        None  # null: token; at action level sequence prompt_last
    )
    clip: Positive | None = 0.2  # null: off
    half: bool = True  # 1/2 (V - R)^2
    coef: NonNegative = 1.0
    next_state: Literal["trained", "untrained", "ignored"] = (
        "trained"  # the state after the end, which reward_shaping.score_position=next_token pays
    )
    warmup_steps: Natural = 0  # PPO steps at the start in which the critic alone learns
    pretrain_rollouts: Natural = (
        0  # rollouts before the first step on which the critic alone learns, with lambda 1
    )


@dataclass
class EntropyConfig:
    coef: NonNegative = 0.0
    kind: Literal["exact", "sample"] = "exact"  # sample: -log p of the drawn token


@dataclass
class LossConfig:
    agg: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"] = (
        "token_mean"  # over the whole optimizer step, all ranks
    )
    norm: Count | None = (
        None  # of token_sum_norm: tokens that one answer counts as; null: sampling.max_new_tokens
    )


@dataclass
class RewardShapingConfig:
    score_position: Literal["last_token", "next_token"] = (
        "last_token"  # of the score; next_token: one after the last action
    )
    clip: Positive | None = 5.0  # scores to [-clip, clip]; null: off
    normalize: Literal["none", "running", "first"] = (
        "none"  # by mean and std of all scores so far, or of the first rollout's; before the clip
    )
    normalize_std: bool = True  # false: only the mean is taken away
    missing_eos: Literal["subtract", "set", "scale"] | None = (
        None  # what happens to the score of an answer cut at the length limit
    )
    missing_eos_value: float = 1.0
    overlong_buffer: Positive | None = (
        None  # tokens before the limit over which a penalty grows (DAPO); below 1: that share of the limit
    )
    overlong_factor: NonNegative = 1.0  # the penalty at the limit
    length_penalty: float = 0.0  # taken off the score for each token


@dataclass
class RolloutISConfig:
    """Importance weights for a decode backend whose log-probs differ from the training engine's."""

    kind: Literal["none", "tis", "icepop", "seq_mask_tis"] = "none"
    low: NonNegative = 0.5
    high: Positive = 2.0


@dataclass
class DynamicSamplingConfig:
    """Prompts whose answers all score alike teach a group baseline nothing: others are drawn in their place (DAPO).

    Judged by the reward's own scores, before any penalty.
    """

    enabled: bool = False
    max_rounds: Count = (
        10  # of generation in one step; what is still missing then is filled up with such prompts
    )


@dataclass
class PtxConfig:
    """A language-modelling loss on other texts beside PPO's (InstructGPT). The texts: data.ptx_path."""

    coef: NonNegative = 0.0  # 0: off
    batch_size: Count | None = None  # texts of one optimizer step, over all ranks; null: minibatch_size


@dataclass
class AlgoConfig:
    kl: KLConfig
    gae: GAEConfig
    advantage: AdvantageConfig
    policy: PolicyConfig
    value: ValueConfig
    entropy: EntropyConfig
    loss: LossConfig
    reward_shaping: RewardShapingConfig
    rollout_is: RolloutISConfig
    dynamic_sampling: DynamicSamplingConfig
    ptx: PtxConfig
    action_level: Literal["token", "sequence"] = (
        "token"  # sequence: a whole answer is one action, with one ratio
    )
    train_on_eos: bool | None = (
        True  # the end token is an action; null: unless it is the pad token too (DeepSpeed-Chat)
    )
    old_policy: Literal["rollout", "lagged"] = (
        "rollout"  # lagged: a copy of the actor from up to `lag` steps ago
    )
    lag: Count = 4  # PPO steps between two copies
    aux_coef: NonNegative | None = (
        0.0  # of a mixture of experts' load-balancing loss; null: the model's own, 0 without experts
    )
    epochs: Count = 2  # passes over one rollout
    target_kl: Positive | None = (
        None  # no more minibatches once the policy is so far from the old one: nats per token (or answer, by level)
    )
    minibatch_size: Count | None = (
        None  # samples of one optimizer step, over all ranks; null: the whole rollout
    )


@dataclass
class MemoryConfig:
    """The most tokens, padding counted, in one forward on one rank. Changes speed and memory, never the result.

    A decode counts each prompt with the longest answer that it may get, every other forward the whole rows as they are.
    """

    rollout_tokens: Count = 32768
    score_tokens: Count = 16384
    train_tokens: Count = 8192
    layout: Literal["auto", "packed", "padded"] = (
        "auto"  # of rows in a forward; auto: packed, where the model's attention can and it pays
    )


@dataclass
class CheckpointConfig:
    every: Natural | None = None  # steps; null: at the end only; 0: never
    keep_last: Count = 2
    keep_best: bool = False  # also keep the best by eval/score_mean


@dataclass
class HealthConfig:
    """What happens when numbers go wrong. Optimizer steps with a non-finite loss, gradient, score or log-prob are always skipped, on all ranks."""

    # optimizer steps skipped in a row (a rollout that is left out counts once); then the run goes back to its last checkpoint, the next time it stops
    max_skips: Count = 5
    max_kl: Positive | None = None  # ceiling of kl/k3_token_mean, nats per token
    kl_action: Literal["warn", "stop"] = (
        "warn"  # what is done above it; stop: save, then end with exit code 1
    )


@dataclass
class WandbConfig:
    mode: Literal["online", "offline", "disabled"] = "disabled"
    project: str = "ppo_ds"
    entity: str | None = None
    name: str | None = None  # null: run.name
    tags: list[str] = field(default_factory=list)


@dataclass
class TrackerConfig:
    wandb: WandbConfig
    samples: int = 8  # rows written per step; -1: all


@dataclass
class EvalConfig:
    every: Count | None = None  # steps
    max_prompts: Count | None = None
    greedy: bool = True
    correct_above: float | None = None  # a score above it counts as right: eval/accuracy


@dataclass
class Config:
    run: RunConfig
    actor: ActorConfig
    critic: CriticConfig
    reference: ReferenceConfig
    rollout: RolloutConfig
    sampling: SamplingConfig
    data: DataConfig
    algo: AlgoConfig
    memory: MemoryConfig
    checkpoint: CheckpointConfig
    health: HealthConfig
    tracker: TrackerConfig
    eval: EvalConfig
    reward: dict[str, Any] = _required(
        "reward=model reward.model.path=... or reward=function reward.path=pkg.mod:fn"
    )
    stage: str = "ppo"  # the kind of training, a name in STAGES of registry.py
    prepare: dict[str, Any] | None = (
        None  # a function that makes what the run reads, under its `dir`, before anything is loaded
    )


def from_tree(tree: dict[str, Any]) -> tuple[Config, dict[str, str]]:
    """The Config of a plain nested dict, and what is wrong with it (full key -> line); only without problems is the Config sound."""
    problems: dict[str, str] = {}
    return read(Config, tree, "", problems), problems


def default_dir(name: str) -> str:
    return f"outputs/{name}"


def inherit(config: Config) -> Config:
    """The same config with nothing left to follow from other keys."""
    actor = replace(config.actor.model, path=_home(config.actor.model.path))
    filled = replace(
        config,
        run=replace(
            config.run,
            dir=_home(config.run.dir or default_dir(config.run.name)),
            resume=_home(config.run.resume),
        ),
        actor=replace(config.actor, model=actor),
        critic=replace(config.critic, model=_inherited(config.critic.model, actor, path=None)),
        reference=replace(config.reference, model=_inherited(config.reference.model, actor, path=actor.path)),
        data=_located(config.data),
        algo=replace(config.algo, minibatch_size=config.algo.minibatch_size or rollout_size(config)),
    )
    wandb = replace(config.tracker.wandb, name=config.tracker.wandb.name or config.run.name)
    return replace(filled, tracker=replace(config.tracker, wandb=wandb))


def resolved(config: Config) -> dict[str, Any]:
    """The config as the plain nested dict that config.yaml shows: tuples as lists, nothing left to inherit."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return plain(asdict(inherit(config)))


def rollout_size(config: Config) -> int:
    """Samples of one PPO step, over all ranks."""
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


def uses_reference(config: Config) -> bool:
    """Whether anybody asks for the KL to the reference; else none is loaded."""
    return config.algo.kl.place != "none" or config.algo.kl.after_update


def has_critic(config: Config) -> bool:
    """Whether there is a critic with weights of its own; else none is loaded."""
    return config.algo.advantage.estimator == "gae" and not config.critic.share_trunk


def reference_is_base(config: Config) -> bool:
    """Whether the reference is what the actor's adapters stand on: the actor itself then, without them, and no second copy of the weights."""
    actor, reference = config.actor.model, config.reference.model
    alike = ("path", "revision", "dtype", "attn_implementation")
    return config.actor.lora.rank > 0 and all(
        getattr(reference, name) == getattr(actor, name) for name in alike
    )


def reward_models(section: dict[str, Any], key: str = "reward") -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and section of each model that the reward reads, however deep in a mixture."""
    for name, inner in section.items():
        if isinstance(inner, dict):
            if name == "model" and isinstance(inner.get("path"), str):
                yield f"{key}.model", inner
            yield from reward_models(inner, f"{key}.{name}")


def value_position(algo: AlgoConfig) -> str:
    """Where a value is taken: algo.value.position, or what goes with the level."""
    return algo.value.position or ("prompt_last" if algo.action_level == "sequence" else "token")


def _located(data: DataConfig) -> DataConfig:
    mix = [
        replace(
            part,
            path=_home(part.path),
            split=part.split or data.split,
            prompt_column=part.prompt_column or data.prompt_column,
        )
        for part in data.mix
    ]
    return replace(
        data, path=_home(data.path), eval_path=_home(data.eval_path), ptx_path=_home(data.ptx_path), mix=mix
    )


def _home(path: str | None) -> str | None:
    return str(Path(path).expanduser()) if path and path.startswith("~") else path


def _inherited(model: InheritedModelConfig, actor: ModelConfig, path: str | None) -> InheritedModelConfig:
    own = {name: value for name, value in asdict(model).items() if value is not None}
    same = (
        asdict(actor)
        if model.path is None
        else {**asdict(actor), "revision": None, "trust_remote_code": False}
    )  # another model has its own
    return InheritedModelConfig(
        **{**same, "path": path, **own, **({"path": _home(model.path)} if model.path else {})}
    )
