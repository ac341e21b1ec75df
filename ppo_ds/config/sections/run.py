"""Defines the sections of the run, memory, checkpoints, health, tracking and evaluation."""

from typing import Annotated, Any, Literal

from annotated_types import Ge

from ppo_ds.config.types import Count, Natural, Number, Positive, Section, Text


class RunConfig(Section):
    """Name, length, seed, directory and resumption of a run."""

    name: Text | None = None
    """Name of the run, and of its directory below outputs/; null: the stage."""

    dir: Text | None = None
    """Run directory, where everything is written; null: outputs/<run.name>."""

    seed: Natural = 0
    """Seed of all random number generators."""

    steps: Count | None = None
    """Number of training steps. A step of stage=ppo collects and trains on one rollout; a step of the other
    stages is one optimizer step."""

    epochs: Positive | None = None
    """Passes over the rows of training, instead of run.steps. One pass over a mixture has as many prompts as
    its data sets together."""

    resume: Text = "auto"
    """auto: continue from the newest checkpoint, or start; never: refuse a used run directory; restart: move
    the earlier run in the directory to earlier_N/ and begin anew; or the path of a checkpoint folder."""

    resume_allow_changes: list[Text] = []
    """Keys or sections that may differ from the checkpoint although they change the result."""

    dry_run: bool | Literal["keep"] = False
    """Runs two steps of the same loop on the CPU, with tiny random models of the same architectures, in
    <run.dir>_dry; keep: does not delete that folder at the end."""

    stop_at_step: Count | None = None
    """Stops early at this step, with the schedules of the whole run."""

    max_minutes: Positive | None = None
    """Saves a checkpoint and stops after this time."""

    deterministic: bool = False
    """Uses deterministic algorithms in backward passes on GPUs, which are slower; on a CPU backward passes
    are deterministic without it."""

    threads: Count | None = None
    """CPU threads of each rank; null: the machine's cores divided by its ranks."""

    matmul: Literal["auto", "torch", "onednn"] = "auto"
    """Library that multiplies large fp32 matrices on a CPU: torch (its default, Intel MKL) or onednn; auto:
    onednn on processors of AMD with AVX-512, where it is faster, and torch on others."""

    profile: Count | None = None
    """Step whose trace by torch.profiler rank 0 writes to profile/step_NNNNNN/trace.json.gz; null: none."""

    timeout_minutes: Positive = 30.0
    """A phase without a heartbeat for this time counts as a hang and ends the run."""

    verbose: bool = False
    """Shows the log output of the libraries."""


class MemoryConfig(Section):
    """Token budgets of one forward on one rank, padding included. They change speed and memory, not results.

    Generation counts each prompt with the longest response that it may get; every other forward counts the
    actual rows.
    """

    # A run replaces auto by a number before it uses a budget (planning/budgets.py).

    score_tokens: Count | Literal["auto"] = "auto"
    """Most tokens in one forward without gradients on one rank, such as for log-probs, values, rewards and
    losses on held-out rows; auto: as for rollout_tokens."""

    train_tokens: Count | Literal["auto"] = "auto"
    """Most tokens in one micro-batch of training on one rank; auto: as for rollout_tokens."""

    layout: Literal["auto", "packed", "padded"] = "auto"
    """Layout of the rows of a forward; auto: packed where the model's attention supports it and it is
    faster."""


class GenerationMemoryConfig(MemoryConfig):
    """Token budgets of a stage that generates."""

    rollout_tokens: Count | Literal["auto"] = "auto"
    """Most tokens in one batch of generation on one rank; auto: as many as fit into memory, up to a limit
    beyond which larger batches are not faster."""


class PPOMemoryConfig(GenerationMemoryConfig):
    """Token budgets of one forward on one rank, padding included. They change speed and memory, not results.

    Only reuse_forwards and sequence_parallel also change the last digits of results.

    Generation counts each prompt with the longest response that it may get; every other forward counts the
    actual rows.
    """

    reuse_forwards: Literal["auto", "all", "off"] = "auto"
    """With one optimizer step per rollout, trains on the graphs of the forwards that compute log-probs or
    values, without a second forward; auto: of the actor, which needs no more memory; all: of actor and
    critic. Last digits of the results change, since the rows of an optimizer step are summed in another
    order. If memory runs out in such a forward, the run keeps no further graphs."""

    sequence_parallel: Count = 1
    """Number of ranks that divide the tokens of a forward or backward of actor, critic and reference
    (DeepSpeed-Ulysses). It must divide the ranks and the attention heads and key-value heads of these models,
    whose rows are packed. Generation and reward models do not divide rows."""


class CheckpointConfig(Section):
    """Frequency of checkpoints, and the number of checkpoints to keep."""

    every: Natural | None = None
    """Steps between two checkpoints; null: by time and at the end only; 0: no checkpoints."""

    minutes: Positive | None = 15.0
    """Minutes after which the next step ends with a checkpoint, also between those of checkpoint.every; null:
    by steps only."""

    keep_last: Count = 2
    """Number of most recent checkpoints to keep."""

    export_every: Count | None = None
    """Steps between two exports of the models to step_models/step_NNNNNN/ in the run directory, in the same
    form as at the end of the run; null: only at the end."""

    keep_exports: Count | None = None
    """Number of most recent exports of checkpoint.export_every to keep; null: all."""

    keep_best: bool = False
    """Also keeps the checkpoint of the best evaluation, by checkpoint.best_by; eval.patience sets it to
    true."""

    best_by: Text | None = None
    """Metric of the evaluation that selects the best checkpoint, such as eval/win_rate_vs_ref; null:
    eval/score_mean, with stage=sft eval/loss, with stage=reward_model eval/accuracy."""

    best_mode: Literal["auto", "max", "min"] = "auto"
    """Whether the highest or the lowest value of checkpoint.best_by is the best; auto: the lowest of
    eval/loss, eval/perplexity, eval/ties, eval/calibration_error and standard deviations, the highest of any
    other metric."""


class HealthConfig(Section):
    """Reactions to non-finite numbers.

    Optimizer steps with a non-finite loss, gradient, score or log-prob are always skipped, on all ranks.
    """

    max_skips: Count = 5
    """Optimizer steps skipped in a row before the run goes back to its last checkpoint, and the next time
    stops; with stage=ppo, a rollout that is left out counts once."""


class PPOHealthConfig(HealthConfig):
    """Reactions to non-finite numbers, to a policy that moves too far, and to generation that differs from
    training.

    Optimizer steps with a non-finite loss, gradient, score or log-prob are always skipped, on all ranks. Only
    stage=ppo uses max_kl, kl_action, max_parity and parity_action.
    """

    max_kl: Positive | None = None
    """Upper limit of kl/k3_token_mean, in nats per token; null: no limit."""

    kl_action: Literal["warn", "stop"] = "warn"
    """Reaction to a KL above health.max_kl; stop: save, then end with exit code 1."""

    max_parity: Positive | Literal["auto"] | None = "auto"
    """Upper limit of parity/logp_abs_diff_mean, the mean difference between the log-probs of generation and
    training, in nats per token; auto: as at the start, 0.001 in fp32, 0.02 in fp16, 0.1 in bf16; null: no
    limit."""

    parity_action: Literal["warn", "stop"] = "stop"
    """Reaction to a difference above health.max_parity; stop: leave out the update, save the step before, end
    with exit code 1."""


class WandbConfig(Section):
    """Logging to Weights & Biases."""

    mode: Literal["online", "offline", "disabled"] = "disabled"
    """online: log to wandb.ai; offline: log to a local wandb folder; disabled: do not log."""

    project: Text = "ppo_ds"
    """wandb project."""

    entity: Text | None = None
    """wandb user or team; null: the account's default."""

    name: Text | None = None
    """Name of the wandb run; null: run.name."""

    tags: list[Text] = []
    """Tags of the wandb run."""

    log_report: Literal["never", "end"] = "never"
    """end: upload report.html as an artifact when the run ends."""

    log_model: Literal["never", "end"] = "never"
    """end: upload the exported model as an artifact when the run ends. The run waits for the upload: 60 s,
    and 1 s more for every 10 MB."""


class TensorBoardConfig(Section):
    """Logging to TensorBoard."""

    enabled: bool = False
    """Writes event files to tensorboard/ in the run directory; needs the extra tensorboard."""


class TrackioConfig(Section):
    """Logging to Trackio."""

    enabled: bool = False
    """Logs to the local database of Trackio, in ~/.cache/huggingface/trackio or $TRACKIO_DIR; needs the extra
    trackio."""

    project: Text = "ppo_ds"
    """Trackio project."""

    name: Text | None = None
    """Name of the Trackio run, to which the id in trackio.id is appended; null: run.name."""

    space: Text | None = None
    """Hugging Face Space, ORG/NAME, to log to instead of the local database; null: $TRACKIO_SPACE_ID, if it
    is set."""


class TrackerConfig(Section):
    """Outputs besides the console and metrics.jsonl, which are always written."""

    wandb: WandbConfig
    tensorboard: TensorBoardConfig
    trackio: TrackioConfig

    samples: Annotated[int, Ge(-1)] = 8
    """Rows of samples/ written per step; -1: all rows."""

    sample_tokens: Natural = 0
    """With stage=ppo, the most response tokens per row of samples/ for which log-probs, values, advantages
    and rewards are written, about 60 bytes per token; 0: none."""

    print_answers: Annotated[int, Ge(0)] = 0
    """Steps from one printed prompt with its answer to the next; 0: none. It is the first row of samples/.
    Control characters are shown as escapes."""

    @property
    def logs_histograms(self) -> bool:
        return self.wandb.mode != "disabled" or self.tensorboard.enabled or self.trackio.enabled


class EvalConfig(Section):
    """Evaluation on held-out data: the loss and the accuracy on the rows of data.eval_path."""

    every: Count | None = None
    """Steps between two evaluations; null: only before the first step and after the last."""

    max_prompts: Count | None = None
    """Prompts, rows or pairs of an evaluation; null: all of them."""

    patience: Count | None = None
    """Ends the run after this many evaluations in a row without a new best value of checkpoint.best_by, with
    exit code 0; null: no early stop."""


class PPOEvalConfig(EvalConfig):
    """Evaluation on held-out data.

    With stage=ppo, the policy responds to the prompts of data.eval_path, and the responses are scored. With
    stage=sft and stage=reward_model, the loss and the accuracy on the rows of data.eval_path are measured.
    Only stage=ppo uses greedy, correct_above, rewards, win_rate and train_prompts.
    """

    greedy: bool = True
    """Decodes greedily; false: samples as for training."""

    correct_above: Number | None = None
    """A score above this counts as correct in eval/accuracy; null, and always with a learned reward: no
    accuracy."""

    rewards: dict[str, dict[Any, Any]] = {}
    """More rewards of the held-out responses, by name, each measured as eval/<name>_mean. They do not enter
    training. +reward@eval.rewards.NAME=GROUP adds one of conf/reward/."""

    by: Text | None = None
    """A column of the held-out rows with at most 50 values: eval/score_mean/<value> is the mean score of the
    rows with that value."""

    win_rate: bool = True
    """Measures eval/win_rate_vs_ref: the share of held-out prompts to which the policy's response has a
    higher score than the reference's, ties counted half. A reference with other weights than the initial
    actor responds to the prompts once, at the start."""

    train_prompts: Natural = 8
    """Without data.eval_path, prompts of the training data that are answered before the first step and after
    the last, for the final report; they never select a checkpoint. 0: none."""
