"""Builds the tokenizer and the data of a run: prompts, held-out prompts, and texts for the PTX loss."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

from ppo_ds.config.schema import PPOConfig, TextConfig, rollout_size, trained_models
from ppo_ds.config.types import replace
from ppo_ds.data.demonstrations import DemonstrationSource
from ppo_ds.data.difficulty import Difficulty
from ppo_ds.data.fingerprint import Fingerprint
from ppo_ds.data.mixture import MixedSource, collect_user_errors
from ppo_ds.data.prompts import PromptSource, PromptStream, Source
from ppo_ds.data.stream import Stream
from ppo_ds.distributed.world import World
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer
from ppo_ds.types import Row, Sequences

CHANGES = {  # names in a source's report -> their descriptions in the banner
    "truncated": "truncated",
    "dropped": "dropped",
    "lowered": "limited to sampling.max_new_tokens",
    "repeated": "equal to an earlier one",
    "same_id": 'with the "id" of an earlier one',
}


@dataclass(frozen=True)
class Inputs:
    """The tokenizer and the data of a run, loaded and checked."""

    tokenizer: Tokenizer
    source: Source
    held_out: PromptSource | None
    prompts: PromptStream  # this rank's share of each step
    ptx: Stream[DemonstrationSource, Sequences] | None
    environment_prompt: int = 0  # maximum tokens of an environment's prompt; 0 without an environment

    @property
    def _sources(self) -> list[Source]:
        return [self.source, *([self.held_out] if self.held_out else [])]

    @property
    def fingerprints(self) -> list[Fingerprint]:
        texts = [self.ptx.source.fingerprint] if self.ptx else []
        return [fingerprint for source in self._sources for fingerprint in source.fingerprints] + texts

    @property
    def longest_prompt(self) -> int:
        return max(self.environment_prompt, *(source.longest for source in self._sources))

    def longest_row(self, max_new_tokens: int) -> int:
        """Returns the number of tokens of the longest row for the actor, the reference and the critic."""
        longest_text = self.ptx.source.longest if self.ptx else 0  # of the PTX loss
        return max(self.longest_prompt + max_new_tokens, longest_text)

    def examples(self) -> list[tuple[str, Row]]:
        """Returns (location, row) of one prompt for each sequence of chat roles that occurs in the data."""
        return [example for source in self._sources for example in source.examples()]

    def check_rows(self, check: Callable[[Row], object]) -> None:
        """Runs ``check`` on each row of prompts; raises UserError with the locations of failing rows."""
        collect_user_errors([partial(source.check_rows, check) for source in self._sources])

    def notes(self, max_prompts: int | None) -> list[str]:
        """Returns lines on the held-out prompts and PTX texts, and warnings about unknown characters.

        ``max_prompts`` is eval.max_prompts.
        """
        lines = unknown_characters(*self._sources, self.ptx and self.ptx.source)
        if self.held_out is not None:
            rows = describe_rows(self.held_out.report, "prompts")
            lines.append(f"held out   {self.held_out.path}: {rows}{evaluated(self.held_out, max_prompts)}")
        if self.ptx is not None:
            texts = self.ptx.source
            lines.append(f"texts      {texts.path}: {describe_rows(texts.report, 'texts')}")
        return lines


def evaluated(held_out: Sized, limit: int | None) -> str:
    """Returns a phrase for the banner if ``limit`` (eval.max_prompts) excludes held-out rows, else ""."""
    return f"; the first {limit} are evaluated (eval.max_prompts)" if limit and limit < len(held_out) else ""


def unknown_characters(*sources: Any) -> list[str]:
    """Returns a warning for each source with characters that are unknown to the tokenizer."""
    return [
        f"warning    {source.path}: {count} texts have characters that the tokenizer does not know, which "
        "become its unknown token; correct the data, or use a model with another tokenizer"
        for source in filter(None, sources)
        if (count := source.report.get("unknown"))
    ]


def describe_rows(report: dict[str, int], noun: str) -> str:
    """Describes how many rows a source has and how many were dropped or changed."""
    changes = [f", {report[name]} {words}" for name, words in CHANGES.items() if report.get(name)]
    return f"{report['rows']} {noun}{''.join(changes)}"


def read_inputs(config: PPOConfig, world: World) -> Inputs:
    """Loads the tokenizer and the data; each rank tokenizes a share of the rows. All ranks must call this."""
    tokenizer = build_tokenizer(config)
    source = build_prompts(config, tokenizer, world)
    held_out = build_held_out(config, tokenizer, world)
    section, samples = config.data.difficulty, config.rollout.samples_per_prompt
    difficulty, responses, seed = None, max(section.responses, samples), config.run.seed
    if section.floor is not None:
        difficulty = Difficulty(len(source), section.floor, responses, seed=seed, gather=world.concat)
    prompts = PromptStream(
        source,
        prompts_per_step=config.rollout.prompts_per_step,
        samples_per_prompt=samples,
        rank=world.rank,
        world_size=world.size,
        seed=seed,
        shuffle=config.data.shuffle,
        difficulty=difficulty,
    )
    environment_prompt = config.data.max_prompt_tokens if config.rollout.environment.path else 0
    ptx = build_ptx(config, tokenizer, world)
    return Inputs(tokenizer, source, held_out, prompts, ptx, environment_prompt)


def build_tokenizer(config: TextConfig, name: str = "actor") -> Tokenizer:
    model, data = trained_models(config)[name].model, config.data
    assert model.path is not None and model.trust_remote_code is not None, "inherited from the actor"
    return load_tokenizer(
        model.path,
        model.revision,
        model.trust_remote_code,
        data.chat_template,
        data.chat_template_kwargs,
        key=f"{name}.model.path",
    )


def stop_ids(config: PPOConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a response: ``sampling.stop_token_ids``, or else those of the tokenizer.

    Raises UserError if nothing would end a response, or if a given id is not a token.
    """
    given = config.sampling.stop_token_ids
    if given is None:
        if not tokenizer.stop_ids and not config.sampling.stop:
            raise UserError(
                f"actor.model.path={config.actor.model.path}: neither the tokenizer nor "
                "generation_config.json names an end token, so no response would end by itself; set "
                "sampling.stop_token_ids or sampling.stop, or sampling.stop_token_ids=[] if that is intended"
            )
        return tokenizer.stop_ids
    # a vocabulary may have gaps, so ids above the number of tokens can be valid
    unknown = [i for i in given if i >= tokenizer.vocab_size and i not in tokenizer.hf.get_vocab().values()]
    if unknown:
        raise UserError(
            f"sampling.stop_token_ids: {unknown[0]} is not a token: the actor's tokenizer has "
            f"{tokenizer.vocab_size} tokens; remove it, or set null for the model's own end tokens"
        )
    return tuple(given)


def build_prompts(config: PPOConfig, tokenizer: Tokenizer, world: World | None = None) -> Source:
    """Loads ``data.path`` or the data sets of ``data.mix``; ``data.max_samples`` limits each data set."""
    data = config.data
    if not data.mix:
        return _prompts_of_path(config, tokenizer, world)
    loaders = [
        partial(
            _loader(config, tokenizer, world),
            part.path,
            data=replace(data, revision=part.revision, prompt_column=part.prompt_column),
            split=part.split,
            max_samples=data.max_samples,
            key=f"data.mix[{i}].path",
        )
        for i, part in enumerate(data.mix)
    ]
    return MixedSource(collect_user_errors(loaders), [part.weight for part in data.mix])


def build_held_out(
    config: PPOConfig, tokenizer: Tokenizer, world: World | None = None
) -> PromptSource | None:
    data = config.data
    if data.eval_path is None:
        return None
    load = _loader(config, tokenizer, world)
    return _grouped(config, load(data.eval_path, split=data.eval_split, key="data.eval_path"))


def build_compared(config: PPOConfig, tokenizer: Tokenizer, world: World | None = None) -> PromptSource:
    """Loads the prompts for launch/evaluate.py: the held-out prompts, or else those of ``data.path``."""
    if (held_out := build_held_out(config, tokenizer, world)) is not None:
        return held_out
    if config.data.path is None:
        raise UserError("data.path is missing: the evaluation needs prompts in data.eval_path or data.path")
    return _grouped(config, _prompts_of_path(config, tokenizer, world))


def _grouped(config: PPOConfig, source: PromptSource) -> PromptSource:
    """Returns ``source``; raises UserError if eval.by is set but is no column of few, short values."""
    if config.eval.by:
        source.check_column(config.eval.by, "eval.by")
    return source


def _prompts_of_path(config: PPOConfig, tokenizer: Tokenizer, world: World | None) -> PromptSource:
    data, load = config.data, _loader(config, tokenizer, world)
    return load(data.path, split=data.split, max_samples=data.max_samples, key="data.path")


def _loader(config: PPOConfig, tokenizer: Tokenizer, world: World | None) -> Callable[..., PromptSource]:
    limit = config.sampling.max_new_tokens
    return partial(PromptSource, data=config.data, tokenizer=tokenizer, max_new_tokens=limit, world=world)


def build_ptx(
    config: PPOConfig, tokenizer: Tokenizer, world: World | None = None
) -> Stream[DemonstrationSource, Sequences] | None:
    """Returns the stream of texts for algo.ptx, a batch per optimizer step; None if there is no PTX loss."""
    data, ptx = config.data, config.algo.ptx
    if not ptx.coef or data.ptx_path is None:
        return None
    source = DemonstrationSource(
        data.ptx_path,
        data=replace(data, revision=None, prompt_column=None),  # these keys describe the prompts
        tokenizer=tokenizer,
        split=data.ptx_split,
        max_tokens=data.ptx_max_tokens,
        world=world,
    )
    batch_size = ptx.batch_size or config.algo.minibatch_size or rollout_size(config)
    return Stream(source, batch_size=batch_size, key="algo.ptx.batch_size", seed=config.run.seed)
