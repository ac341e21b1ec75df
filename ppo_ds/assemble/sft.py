"""Builds the supervised fine-tuning stage from its config."""

from __future__ import annotations

from functools import partial

from ppo_ds.assemble.data import build_tokenizer, describe_rows, evaluated, unknown_characters
from ppo_ds.assemble.downloads import models_to_download
from ppo_ds.assemble.engines import Needs, trained_engine
from ppo_ds.assemble.generator import rebuilt_on_change
from ppo_ds.assemble.roles import actor_module
from ppo_ds.assemble.shared import (
    choose_layout,
    eval_weights,
    evaluated_rows,
    finetuning_step,
    loading,
    machine,
    slow_dtypes,
    trained_model,
    training_notes,
    training_steps,
)
from ppo_ds.config.schema import SFTStageConfig
from ppo_ds.data.demonstrations import DemonstrationSource
from ppo_ds.data.stream import Stream
from ppo_ds.distributed.world import World, seed_everything
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.finetune.sft import SFTTrainer
from ppo_ds.models.download import download_weights
from ppo_ds.models.policy import unsharded_twin
from ppo_ds.models.size import shape_of
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.planning.budgets import settle
from ppo_ds.planning.finetune_memory import estimate_finetuning
from ppo_ds.planning.model_memory import decode_bytes_bound, logit_bytes
from ppo_ds.rollout.base import Generator
from ppo_ds.rollout.hf import HFGenerator
from ppo_ds.run.stage import RunContext
from ppo_ds.types import Prompts, Sequences

LEARNED = {
    "answer": "the last answer, or a whole text",
    "assistant": "every answer, or a whole text",
    "all": "every token",
}


def build_sft(config: SFTStageConfig, context: RunContext) -> SFTTrainer:
    """Loads data and model and builds the stage. May raise UserError. All ranks must call this."""
    world, section, role = context.world, config.sft, config.actor
    context.banner.starting("reading and tokenizing the data")
    tokenizer, train, held_out = read_demonstrations(config, world)
    rows: Stream[DemonstrationSource, Sequences] = Stream(
        train,
        batch_size=section.batch_size,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        key="sft.batch_size",
    )
    longest = max(source.longest for source in (train, held_out) if source is not None)
    prompts = held_out.prompts(section.samples, section.sample_tokens) if held_out else None
    steps = training_steps(config.run, len(train), section.batch_size)
    download_weights(models_to_download(config), world)
    loading(context, "actor", role.model.path, role.model.revision)
    actor = build_actor(config, context, needs(config, tokenizer, longest, prompts), steps)
    ema = WeightCopy(actor) if role.ema.decay is not None else None
    memory = partial(
        estimate_finetuning,
        name="actor",
        shape=shape_of(actor.module.lm),
        longest=longest,
        evaluated=evaluated_rows(config, held_out),
        answers=(0, 0) if prompts is None else (len(prompts), answered_tokens(config, prompts)),
    )
    config = settle(config, context, memory)
    context.banner.note(*notes(config, actor, train, held_out, prompts))
    context.banner.summarize(*summary(config, world, train, steps))
    seed_everything(config.run.seed + world.rank + 1)  # each rank draws its own random numbers
    return SFTTrainer(
        context=context,
        config=section,
        seed=config.run.seed,
        total_steps=steps,
        train_tokens=int(config.memory.train_tokens),
        score_tokens=int(config.memory.score_tokens),
        eval_rows=config.eval.max_prompts,
        actor=actor,
        eval_weights=eval_weights(ema, role.ema.evaluate),
        update=finetuning_step(context, "actor", "sft", actor, actor.module.lm, ema, role.ema),
        rows=rows,
        held_out=held_out,
        prompts=prompts,
        generator=build_generator(context, actor, tokenizer),
        tokenizer=tokenizer,
    )


def build_generator(context: RunContext, actor: HybridActor, tokenizer: Tokenizer) -> Generator:
    budget = context.budgets.rollout

    def make(token_budget: int) -> Generator:
        return HFGenerator(
            lambda: actor.lm,
            tokenizer=tokenizer,
            token_budget=token_budget,
            lockstep_max=actor.lockstep_max,
            should_stop=context.stop.should_stop,
        )

    generator = rebuilt_on_change(make(int(budget)), make, budget)
    return context.budgets.guard(budget, generator, what="generation", repeatable=not actor.lockstep)


def read_demonstrations(
    config: SFTStageConfig, world: World | None = None
) -> tuple[Tokenizer, DemonstrationSource, DemonstrationSource | None]:
    """Loads the tokenizer, training and held-out rows. May raise UserError. All ranks must call this."""
    data, tokenizer = config.data, build_tokenizer(config)
    load = partial(
        DemonstrationSource,
        data=data,
        tokenizer=tokenizer,
        learn=config.sft.learn,
        max_tokens=config.sft.max_tokens,
        max_tokens_key="sft.max_tokens",
        world=world,
    )
    assert data.path is not None, "checked by config/checks/data.py"
    train = load(data.path, split=data.split, max_samples=data.max_samples, key="data.path")
    if data.eval_path is None:
        return tokenizer, train, None
    return tokenizer, train, load(data.eval_path, split=data.eval_split, key="data.eval_path")


def check_demonstrations(config: SFTStageConfig, world: World, *, prepared: bool) -> None:
    """Checks the data unless `prepare` must still create it; may raise UserError. All ranks call this."""
    if prepared:
        read_demonstrations(config, world)


def build_actor(config: SFTStageConfig, context: RunContext, needs: Needs, steps: int) -> HybridActor:
    """Builds the engine of the trained model. All ranks must call this."""
    actor = partial(actor_module, config.actor, config.run.seed)
    load = needs.checked(actor, config.actor.model.path, "actor.model.path")
    make = partial(HybridActor, make_inference_copy=unsharded_twin, timer=context.timer)
    return trained_engine(load, make, config.actor, "actor", context.world, steps)


def needs(config: SFTStageConfig, tokenizer: Tokenizer, longest: int, prompts: Prompts | None) -> Needs:
    """Returns what the data require of the model; ``longest`` is the number of tokens of the longest row."""
    return Needs(
        tokenizer.id_bound,
        max(longest, 0 if prompts is None else answered_tokens(config, prompts)),
        longest="the longest row (or the longest held-out prompt and sft.sample_tokens together)",
        remedy="sft.max_tokens or sft.sample_tokens",
    )


def answered_tokens(config: SFTStageConfig, prompts: Prompts) -> int:
    return prompts.mask.shape[1] + config.sft.sample_tokens


# ---- lines of the start-up banner


def describe(source: DemonstrationSource) -> str:
    return describe_rows(source.report, "rows")


def notes(
    config: SFTStageConfig,
    actor: HybridActor,
    train: DemonstrationSource,
    held_out: DemonstrationSource | None,
    prompts: Prompts | None,
) -> list[str]:
    """Chooses the layout of forwards and plans the generation of evaluations; returns lines for the banner.

    All ranks must call this.
    """
    world = actor.world
    lines = [
        *training_notes("sft", "actor", config.actor, actor),
        *unknown_characters(train, held_out),
        *slow_dtypes(config, world),
        *choose_layout(config.memory.layout, "actor", actor, world.device),
    ]
    if prompts is not None:
        rows = -(-len(prompts) // world.size)
        tokens = min(int(config.memory.rollout_tokens), rows * answered_tokens(config, prompts))
        each = actor.module.lm.dtype.itemsize
        logit = logit_bytes(each, world.device.type == "cuda", top_k=1, top_p=1.0)  # greedy
        line = actor.plan_generation(
            generation_gather="auto",
            offload_states="auto",
            decoding_bytes=decode_bytes_bound(shape_of(actor.module.lm), tokens, rows, each, logit),
            critic=None,
        )
        lines += [line] if line else []
    if held_out is not None:
        used = evaluated(held_out, config.eval.max_prompts)
        lines.append(f"held out   {held_out.path}: {describe(held_out)}{used}")
    return lines


def summary(config: SFTStageConfig, world: World, train: DemonstrationSource, steps: int) -> list[str]:
    size, (learned, tokens) = config.sft.batch_size, train.token_counts
    found = ""
    if train.has_chats and train.learn != "all":
        by = "the marks of the chat template" if train.marked else "rendering prefixes of each chat"
        found = f", found by {by}"
    return [
        *machine(world),
        trained_model("actor", config.actor.model.path, config.actor),
        f"data       {train.path}: {describe(train)}",
        f"learned    sft.learn={train.learn}: {LEARNED[train.learn]}{found}: "
        f"{learned:,} of {tokens:,} tokens ({learned / tokens:.1%})",
        f"update     {size} rows per optimizer step, {steps} steps, "
        f"{steps * size / len(train):.3g} passes over the data",
    ]
