"""The `data` section to what the run reads: the tokenizer, prompts, held-out prompts, and texts for the language-modelling loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ppo_ds.config.schema import Config, rollout_size
from ppo_ds.data.demonstrations import DemonstrationSource, DemonstrationStream
from ppo_ds.data.mixture import MixedSource, collect_user_errors
from ppo_ds.data.prompts import PromptSource, PromptStream, Source
from ppo_ds.distributed.world import World
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer
from ppo_ds.types import Row


@dataclass(frozen=True)
class Inputs:
    """What a run reads, loaded and checked."""

    tokenizer: Tokenizer
    source: Source
    held_out: PromptSource | None
    prompts: PromptStream  # this rank's share of each step
    ptx: DemonstrationStream | None

    @property
    def longest_prompt(self) -> int:
        return max(self.source.longest, self.held_out.longest if self.held_out else 0)

    def examples(self) -> list[tuple[str, Row]]:
        """Place and metadata of one prompt for each order of roles that there is."""
        return [each for source in self._sources for each in source.examples()]

    def check_rows(self, check: Callable[[Row], object]) -> None:
        """Runs ``check`` on all rows of prompts; raises UserError with the locations of those that fail."""
        collect_user_errors([partial(source.check_rows, check) for source in self._sources])

    def notes(self) -> list[str]:
        """For the start-up banner: what is read beside the prompts, and what became of it."""
        lines = (
            [f"held out   {self.held_out.path}: {describe_rows(self.held_out.report, 'prompts')}"]
            if self.held_out
            else []
        )
        return lines + (
            [f"texts      {self.ptx.source.path}: {describe_rows(self.ptx.source.report, 'texts')}"]
            if self.ptx
            else []
        )

    @property
    def _sources(self) -> list[Source]:
        return [self.source, *([self.held_out] if self.held_out else [])]

    @property
    def longest_text(self) -> int:
        """Of the language-modelling loss; 0 without one."""
        return self.ptx.source.longest if self.ptx else 0


def describe_rows(report: dict[str, int], what: str) -> str:
    """A source's report in words: what was dropped or changed is never passed over. ``what``: the rows are."""
    changes = {
        "truncated": "cut",
        "dropped": "dropped",
        "lowered": "asked for more than sampling.max_new_tokens",
        "repeated": "the same as an earlier one",
        "same_id": 'with the "id" of an earlier one',
    }
    return f"{report['rows']} {what}" + "".join(
        f", {report[name]} {became}" for name, became in changes.items() if report.get(name)
    )


def read_inputs(config: Config, world: World) -> Inputs:
    tokenizer = build_tokenizer(config)
    source = build_prompts(config, tokenizer)
    held_out = build_held_out(config, tokenizer)
    return Inputs(
        tokenizer, source, held_out, build_stream(config, world, source), build_ptx(config, tokenizer)
    )


def build_tokenizer(config: Config) -> Tokenizer:
    """The actor's."""
    model, data = config.actor.model, config.data
    return load_tokenizer(
        model.path,
        model.revision,
        model.trust_remote_code,
        data.chat_template,
        data.chat_template_kwargs,
        key="actor.model.path",
    )


def stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer: ``sampling.stop_token_ids``, or the tokenizer's own."""
    given = config.sampling.stop_token_ids
    if given is None and not tokenizer.stop_ids and not config.sampling.stop:
        raise UserError(
            f"actor.model.path={config.actor.model.path}: neither its tokenizer nor its generation_config.json names an end token: no answer would "
            "end by itself; give sampling.stop_token_ids or sampling.stop, or sampling.stop_token_ids=[] if that is meant"
        )
    if given is None:
        return tokenizer.stop_ids
    beyond = [
        i for i in given if i >= tokenizer.vocab_size and i not in tokenizer.hf.get_vocab().values()
    ]  # a vocabulary may have gaps
    if beyond:
        raise UserError(
            f"sampling.stop_token_ids: {beyond[0]} is none: the actor's tokenizer has {tokenizer.vocab_size} tokens; "
            "leave it out, or null takes the model's own ends"
        )
    return tuple(given)


def build_prompts(config: Config, tokenizer: Tokenizer) -> Source:
    """``data.path``, or ``data.mix``: then ``data.max_samples`` is of each set."""
    data = config.data
    if not data.mix:
        return _prompts(
            config,
            tokenizer,
            data.path,
            data.split,
            data.revision,
            data.prompt_column,
            data.max_samples,
            "data.path",
        )
    makers = [
        partial(
            _prompts,
            config,
            tokenizer,
            part.path,
            part.split,
            part.revision,
            part.prompt_column,
            data.max_samples,
            f"data.mix[{i}].path",
        )
        for i, part in enumerate(data.mix)
    ]
    return MixedSource(collect_user_errors(makers), [part.weight for part in data.mix])


def build_held_out(config: Config, tokenizer: Tokenizer) -> PromptSource | None:
    data = config.data
    if data.eval_path is None:
        return None
    return _prompts(
        config,
        tokenizer,
        data.eval_path,
        data.eval_split,
        data.revision,
        data.prompt_column,
        None,
        "data.eval_path",
    )


def _prompts(
    config: Config,
    tokenizer: Tokenizer,
    path: str,
    split: str,
    revision: str | None,
    prompt_column: str | None,
    max_samples: int | None,
    key: str,
) -> PromptSource:
    data = config.data
    return PromptSource(
        path,
        tokenizer=tokenizer,
        max_new_tokens=config.sampling.max_new_tokens,
        split=split,
        revision=revision,
        prompt_column=prompt_column,
        apply_chat_template=data.apply_chat_template,
        system=data.system,
        max_samples=max_samples,
        max_prompt_tokens=data.max_prompt_tokens,
        long_prompts=data.long_prompts,
        key=key,
    )


def build_stream(config: Config, world: World, source: Source) -> PromptStream:
    """This rank's share of each step's prompts."""
    return PromptStream(
        source,
        prompts_per_step=config.rollout.prompts_per_step,
        samples_per_prompt=config.rollout.samples_per_prompt,
        rank=world.rank,
        world_size=world.size,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )


def build_ptx(config: Config, tokenizer: Tokenizer) -> DemonstrationStream | None:
    """The texts of algo.ptx, a batch for each optimizer step."""
    data, ptx = config.data, config.algo.ptx
    if not ptx.coef or data.ptx_path is None:
        return None
    source = DemonstrationSource(
        data.ptx_path,
        tokenizer=tokenizer,
        split=data.ptx_split,
        apply_chat_template=data.apply_chat_template,
        system=data.system,
        max_tokens=data.ptx_max_tokens,
    )
    batch_size = ptx.batch_size or config.algo.minibatch_size or rollout_size(config)
    return DemonstrationStream(source, batch_size=batch_size, seed=config.run.seed)
