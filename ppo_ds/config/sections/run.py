"""Defines the sections of the run, memory, checkpoints, health, tracking and evaluation."""

from typing import Annotated, Any, Literal

from annotated_types import Ge

from ppo_ds.config.types import Count, Natural, Number, Positive, Section, Text


class RunConfig(Section):
    """Name, length, seed, directory and resumption of a run."""

    name: Text | None = None
    """Name of the run and of its directory below outputs/; null: the stage."""

    dir: Text | None = None
    """Run directory, which holds all files of the run; null: outputs/<run.name>."""

    note: Text | None = None
    """A sentence about the run, shown in the banner."""

    seed: Natural = 0
    """Seed of all random number generators."""

    steps: Count | None = None
    """Number of training steps. With stage=ppo, a step is one rollout and the training on it; with other
    stages, one optimizer step."""

    epochs: Positive | None = None
    """Number of passes over the training rows, instead of run.steps. One pass over a mixture has as many
    prompts as its data sets together."""

    resume: Text = "auto"
    """auto: continues from the newest checkpoint, or starts; never: refuses a used run directory; restart:
    moves the earlier run to earlier_N/ and starts; or the path of a checkpoint folder."""

    resume_allow_changes: list[Text] = []
    """Keys or sections that may differ from the checkpoint although they change the result."""

    dry_run: bool | Literal["keep"] = False
    """Runs two steps on the CPU in <run.dir>_dry, with tiny random models of the same architectures; keep:
    does not delete that folder at the end."""

    stop_at_step: Count | None = None
    """Ends the run early, after this step; schedules are still those of the whole run."""

    max_minutes: Positive | None = None
    """Saves a checkpoint and stops after this time."""

    deterministic: bool = False
    """Uses deterministic backward passes on GPUs, which are slower; on CPUs, backward passes are always
    deterministic."""

    threads: Count | None = None
    """CPU threads of each rank; null: the machine's cores divided by the number of its ranks."""

    matmul: Literal["auto", "torch", "onednn"] = "auto"
    """Library of large fp32 matrix products on a CPU; auto: onednn on AMD processors since Zen 5, else torch
    (Intel MKL)."""

    profile: Count | None = None
    """Step whose torch.profiler trace rank 0 writes to profile/step_NNNNNN/trace.json.gz; null: none."""

    timeout_minutes: Positive = 30.0
    """If a phase has no heartbeat for this time, the run ends as hung."""

    verbose: bool = False
    """Shows the log output of the libraries."""


class MemoryConfig(Section):
    """Token budgets of one forward on one rank, padding included. They change results only by rounding."""

    # A run replaces auto by a number before it uses a budget (planning/budgets.py).

    score_tokens: Count | Literal["auto"] = "auto"
    """Most tokens in one forward without gradients (log-probs, values, rewards, held-out losses); auto: as
    many as fit into memory and increase speed."""

    train_tokens: Count | Literal["auto"] = "auto"
    """Most tokens in one micro-batch of training; auto: as many as fit into memory and increase speed."""

    layout: Literal["auto", "packed", "padded"] = "auto"
    """Layout of the rows of a forward; auto: packed if the model's attention supports it and packing is
    faster."""


class GenerationMemoryConfig(MemoryConfig):
    """Token budgets of a stage that generates."""

    rollout_tokens: Count | Literal["auto"] = "auto"
    """Most tokens in one batch of generation; auto: as many as fit into memory and increase speed."""


class PPOMemoryConfig(GenerationMemoryConfig):
    """Token budgets of one forward on one rank, padding included; generation counts the longest possible
    responses.

    These keys change speed and memory, and results only by rounding.
    """

    reuse_forwards: Literal["auto", "all", "off"] = "auto"
    """With one optimizer step per rollout, the update reuses forwards that compute log-probs or values. auto:
    the actor's forward, or the critic's if the actor has none before the update; all: both, which needs more
    memory; off: none."""

    sequence_parallel: Count = 1
    """Ranks that divide the tokens of a forward of actor, critic and reference (DeepSpeed-Ulysses). Must
    divide the number of ranks, of attention heads and of key-value heads; needs packed rows."""


class CheckpointConfig(Section):
    """Frequency and number of checkpoints."""

    every: Natural | None = None
    """Steps between checkpoints; null: by time and at the end only; 0: no checkpoints."""

    minutes: Positive | None = 15.0
    """Minutes since the last checkpoint after which a step ends with another one, in addition to
    checkpoint.every; null: by steps only."""

    keep_last: Count = 2
    """Number of most recent checkpoints to keep."""

    export_every: Count | None = None
    """Steps between exports of the models to step_models/step_NNNNNN/, with the same folders as the final
    export; null: only at the end."""

    keep_exports: Count | None = None
    """Number of most recent exports to keep; null: all."""

    keep_best: bool = False
    """Also keeps the checkpoint with the best value of checkpoint.best_by; eval.patience sets this key to
    true."""

    best_by: Text | None = None
    """Metric of the evaluation that selects the best checkpoint; null: eval/score_mean (stage=ppo), eval/loss
    (sft) or eval/accuracy (reward_model)."""

    best_mode: Literal["auto", "max", "min"] = "auto"
    """Whether the highest or the lowest value of checkpoint.best_by is best; auto: the lowest of eval/loss,
    eval/perplexity, eval/ties, eval/calibration_error and standard deviations, the highest of others."""


class HealthConfig(Section):
    """Reactions to non-finite numbers.

    Optimizer steps with a non-finite loss, gradient, score or log-prob are always skipped, on all ranks.
    """

    max_skips: Count = 5
    """Number of consecutive skipped optimizer steps after which the run goes back to its last checkpoint. The
    second time, or without a checkpoint, it ends. With stage=ppo, a skipped rollout counts as one step."""


class PPOHealthConfig(HealthConfig):
    """Reactions to non-finite numbers, to a policy that moves too far, and to generation that differs from
    training.

    Optimizer steps with a non-finite loss, gradient, score or log-prob are always skipped, on all ranks. Only
    stage=ppo uses keys other than max_skips.
    """

    max_kl: Positive | None = None
    """Upper limit of kl/k3_token_mean, in nats per token; null: no limit."""

    kl_action: Literal["warn", "stop"] = "warn"
    """Reaction to a KL above health.max_kl; stop: the run saves a checkpoint and ends with exit code 1."""

    max_parity: Positive | Literal["auto"] | None = "auto"
    """Upper limit of parity/logp_abs_diff_mean, in nats per token; auto: 0.001 in fp32, 0.02 in fp16, 0.1 in
    bf16; null: no limit."""

    parity_action: Literal["warn", "stop"] = "stop"
    """Reaction to a difference above health.max_parity; stop: the run skips the update, saves the state after
    the previous step and ends with exit code 1."""


class WandbConfig(Section):
    """Logging to Weights & Biases."""

    mode: Literal["online", "offline", "disabled"] = "disabled"
    """online: logs to wandb.ai; offline: to a local wandb folder."""

    project: Text = "ppo_ds"
    """wandb project."""

    entity: Text | None = None
    """wandb user or team; null: the account's default."""

    name: Text | None = None
    """Name of the wandb run; null: run.name."""

    tags: list[Text] = []
    """Tags of the wandb run."""

    log_report: Literal["never", "end"] = "never"
    """end: uploads report.html as an artifact when the run ends."""

    log_model: Literal["never", "end"] = "never"
    """end: uploads the exported model as an artifact when the run ends, and waits at most 60 s plus 1 s per
    10 MB."""


class TensorBoardConfig(Section):
    """Logging to TensorBoard."""

    enabled: bool = False
    """Writes event files to tensorboard/ in the run directory; needs the extra tensorboard."""


class TrackioConfig(Section):
    """Logging to Trackio."""

    enabled: bool = False
    """Logs to Trackio's local database, in ~/.cache/huggingface/trackio or $TRACKIO_DIR; needs the extra
    trackio."""

    project: Text = "ppo_ds"
    """Trackio project."""

    name: Text | None = None
    """Name of the Trackio run, followed by the id in trackio.id; null: run.name."""

    space: Text | None = None
    """Hugging Face Space, ORG/NAME, instead of the local database; null: $TRACKIO_SPACE_ID, if it is set."""


class TrackerConfig(Section):
    """Outputs besides the console and metrics.jsonl, which are always written."""

    wandb: WandbConfig
    tensorboard: TensorBoardConfig
    trackio: TrackioConfig

    samples: Annotated[int, Ge(-1)] = 8
    """Rows of samples/ written per step; -1: all rows."""

    sample_tokens: Natural = 0
    """With stage=ppo, number of response tokens per row of samples/ for which log-probs, values, advantages
    and rewards are written (about 60 bytes per token); 0: none."""

    print_answers: Annotated[int, Ge(0)] = 0
    """Steps between printed responses, each with its prompt (the first row of samples/); 0: none."""

    print_updates: bool = False
    """With stage=ppo, prints for each optimizer step the losses, and the KL to the reference (k1 per token)
    before and after the step on its rows. This needs one more forward per optimizer step."""

    @property
    def logs_histograms(self) -> bool:
        return self.wandb.mode != "disabled" or self.tensorboard.enabled or self.trackio.enabled


class EvalConfig(Section):
    """Evaluation on held-out data: the loss and the accuracy on the rows of data.eval_path."""

    every: Count | None = None
    """Steps between evaluations; null: only before the first step and after the last."""

    max_prompts: Count | None = None
    """Largest number of prompts, rows or pairs in an evaluation; null: all."""

    patience: Count | None = None
    """Ends the run, with exit code 0, after this many evaluations in a row without a new best value of
    checkpoint.best_by; null: never."""


class PPOEvalConfig(EvalConfig):
    """Evaluation on held-out data.

    With stage=ppo, the policy's responses to the prompts of data.eval_path are scored. With other stages,
    loss and accuracy on its rows are measured. Only stage=ppo uses greedy, correct_above, rewards, by,
    win_rate and train_prompts.
    """

    greedy: bool = True
    """Decodes greedily; false: samples as for training."""

    correct_above: Number | None = None
    """A response with a score above this is correct in eval/accuracy; null, or a learned reward: no
    accuracy."""

    rewards: dict[str, dict[Any, Any]] = {}
    """Additional rewards of the held-out responses, by name, logged as eval/<name>_mean and not trained on.
    +reward@eval.rewards.NAME=GROUP adds one of conf/reward/."""

    by: Text | None = None
    """Column of the held-out rows; eval/score_mean/<value> is measured for each of its values (at most
    50)."""

    win_rate: bool = True
    """Measures eval/win_rate_vs_ref, the share of held-out prompts on which the policy scores higher than the
    reference; a tie counts half."""

    train_prompts: Natural = 8
    """Without data.eval_path, number of training prompts answered before the first step and after the last,
    for the report; they do not select checkpoints. 0: none."""
