"""Builds the reward-model stage from its config."""

from __future__ import annotations

from functools import partial

from ppo_ds.assemble.data import build_tokenizer, describe_rows, evaluated, unknown_characters
from ppo_ds.assemble.downloads import models_to_download
from ppo_ds.assemble.engines import Needs, add_lora, trained_engine
from ppo_ds.assemble.shared import (
    choose_layout,
    evaluated_rows,
    finetuning_step,
    loading,
    machine,
    slow_dtypes,
    trained_model,
    training_notes,
    training_steps,
)
from ppo_ds.config.schema import RewardModelStageConfig
from ppo_ds.data.preferences import PreferenceSource, padding_token
from ppo_ds.data.stream import Stream
from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import UserError
from ppo_ds.finetune.reward_model import RewardModelTrainer
from ppo_ds.models.download import download_weights
from ppo_ds.models.size import shape_of
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.models.value import ScoreModel, load_scorer
from ppo_ds.planning.budgets import settle
from ppo_ds.planning.finetune_memory import estimate_finetuning
from ppo_ds.run.stage import RunContext
from ppo_ds.types import PreferencePairs

KEY = "scorer.model.path"


def build_reward_model(config: RewardModelStageConfig, context: RunContext) -> RewardModelTrainer:
    """Loads data and model and builds the stage. May raise UserError. All ranks must call this."""
    world, banner, section, role = context.world, context.banner, config.reward_model, config.scorer
    banner.starting("reading and tokenizing the data")
    tokenizer, train, held_out = read_preferences(config, world)
    sources = [train, *([held_out] if held_out else [])]
    pairs: Stream[PreferenceSource, PreferencePairs] = Stream(
        train,
        batch_size=section.batch_size,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        key="reward_model.batch_size",
    )
    steps = training_steps(config.run, len(train), section.batch_size)

    longest = max(source.longest for source in sources)
    download_weights(models_to_download(config), world)
    loading(context, "scorer", role.model.path, role.model.revision)
    scorer = build_scorer(config, world, tokenizer, longest, steps)
    ema = WeightCopy(scorer) if role.ema.decay is not None else None
    memory = partial(
        estimate_finetuning,
        name="scorer",
        shape=shape_of(scorer.module.model),
        longest=longest,
        evaluated=evaluated_rows(config, held_out),
    )
    config = settle(config, context, memory)
    banner.note(*notes(config, scorer, train, held_out))
    banner.summarize(*summary(config, scorer, train, steps))
    pad_id = padding_token(tokenizer, sources) if scorer.module.is_decoder else tokenizer.pad_id
    return RewardModelTrainer(
        context=context,
        config=section,
        total_steps=steps,
        train_tokens=int(config.memory.train_tokens),
        score_tokens=int(config.memory.score_tokens),
        eval_rows=config.eval.max_prompts,
        evaluate_ema=role.ema.evaluate and ema is not None,
        samples=config.tracker.samples if config.tracker.samples >= 0 else None,
        scorer=scorer,
        update=finetuning_step(context, "scorer", "rm", scorer, scorer.module.model, ema, role.ema),
        rows=pairs,
        held_out=held_out,
        tokenizer=tokenizer.with_padding(pad_id),
        saved_settings={
            "score_template": train.template,
            "score_chat_template_kwargs": config.data.chat_template_kwargs,
            "score_joint": train.joint,
        },
    )


def read_preferences(
    config: RewardModelStageConfig, world: World | None = None
) -> tuple[Tokenizer, PreferenceSource, PreferenceSource | None]:
    """Loads the tokenizer, training and held-out pairs. May raise UserError. All ranks must call this."""
    data, tokenizer = config.data, build_tokenizer(config, "scorer")
    load = partial(
        PreferenceSource,
        data=data,
        tokenizer=tokenizer,
        max_tokens=config.reward_model.max_tokens,
        joint=config.reward_model.joint,
        world=world,
    )
    assert data.path is not None, "config/checks/data.py requires it"
    train = load(data.path, split=data.split, max_samples=data.max_samples, key="data.path")
    if data.eval_path is None:
        return tokenizer, train, None
    held_out = load(data.eval_path, split=data.eval_split, key="data.eval_path")
    if held_out.template != train.template:
        raise UserError(
            f"data.eval_path={data.eval_path}: has rows of the kind {held_out.template}, but data.path has "
            f"rows of the kind {train.template}; write both in the same way"
        )
    return tokenizer, train, held_out


def check_preferences(config: RewardModelStageConfig, world: World, *, prepared: bool) -> None:
    """Checks the data unless `prepare` must still create it; may raise UserError. All ranks call this."""
    if prepared:
        read_preferences(config, world)


def scorer_module(config: RewardModelStageConfig, name: str, tokenizer: Tokenizer) -> ScoreModel:
    """Loads the scorer with its adapters, in the state before the first step."""
    section, role = config.reward_model, config.scorer
    scorer = load_scorer(role.model, head_init=section.head_init, seed=config.run.seed, key=KEY)
    add_lora(scorer.model, role.lora, config.run.seed, "scorer.lora")
    return scorer


def build_scorer(
    config: RewardModelStageConfig, world: World, tokenizer: Tokenizer, longest: int, steps: int
) -> TrainedModel:
    """Builds the model's engine for texts of at most ``longest`` tokens. All ranks must call this."""
    role = config.scorer
    needs = Needs(
        tokenizer.id_bound,
        longest,
        longest="the longest texts",
        remedy="reward_model.max_tokens",
        tokenizer_of="scorer",
    )
    load = needs.checked(partial(scorer_module, config, "scorer", tokenizer), role.model.path, KEY)
    return trained_engine(load, TrainedModel, role, "scorer", world, steps)


# ---- lines of the start-up banner


def notes(
    config: RewardModelStageConfig,
    scorer: TrainedModel,
    train: PreferenceSource,
    held_out: PreferenceSource | None,
) -> list[str]:
    """Chooses the layout of forwards; returns lines for the banner. All ranks must call this."""
    lines = [
        *training_notes("reward_model", "scorer", config.scorer, scorer),
        *slow_dtypes(config, scorer.world),
    ]
    if scorer.module.is_decoder:
        lines += choose_layout(config.memory.layout, "scorer", scorer, scorer.world.device)
    elif config.memory.layout == "packed":
        lines.append("warning    memory.layout=packed: the scorer's rows are padded: it is an encoder")
    lines += unknown_characters(train, held_out)
    if held_out is not None:
        used = evaluated(held_out, config.eval.max_prompts)
        lines.append(f"held out   {held_out.path}: {describe_pairs(held_out)}{used}")
    return lines


def summary(
    config: RewardModelStageConfig, scorer: TrainedModel, train: PreferenceSource, steps: int
) -> list[str]:
    section, role = config.reward_model, config.scorer
    head = f"new, {section.head_init}" if scorer.module.new_head else "that of the model"
    return [
        *machine(scorer.world),
        f"{trained_model('scorer', role.model.path, role)}; score head: {head}",
        f"data       {train.path}: {describe_pairs(train)}; format: {train.template}",
        f"update     {section.batch_size} pairs per optimizer step, {steps} steps, "
        f"{steps * section.batch_size / len(train):.3g} passes over the data",
    ]


def describe_pairs(source: PreferenceSource) -> str:
    """Describes how many pairs a source has, and how many were left out for which reasons."""
    report = source.report
    words = {"tied": "tied", "identical": "identical", "dropped": "longer than reward_model.max_tokens"}
    left_out = "".join(f", {report[name]} {text}" for name, text in words.items() if report[name])
    used = f"{len(source)} used" if left_out else "all used"
    return f"{describe_rows({'rows': report['rows']}, 'rows')}, {report['pairs']} pairs{left_out}; {used}"
