"""Compares models on the same prompts: responses of each model, scored by the same rewards and by a judge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import torch

from ppo_ds.assemble.evaluation import describe_failure
from ppo_ds.assemble.preflight import check_rewards, try_functions
from ppo_ds.assemble.reward_models import RewardModels
from ppo_ds.config.schema import PPOConfig
from ppo_ds.config.sections.data import SamplingConfig
from ppo_ds.distributed.world import World
from ppo_ds.errors import RunError, UserError
from ppo_ds.planning.budgets import CPU_LIMITS, largest_scoring
from ppo_ds.ppo.sample_rows import PROMPT_COLUMNS, grouped, last_message
from ppo_ds.run.token_budgets import TokenBudget
from ppo_ds.tools.comparison import Estimate, compare, estimate, pass_rates, prompt_means
from ppo_ds.tools.loading import load_reward
from ppo_ds.tools.model_argument import NamedModel
from ppo_ds.tools.pairwise_judge import PairwiseJudge
from ppo_ds.tools.responses import Reader, Responses, read_prompts, respond
from ppo_ds.types import Reward, Row

SAMPLED = (
    "Unbiased estimate (k1) of KL(model || first) over whole responses, in nats: the mean over the model's "
    "own sampled responses of the sum over their tokens of log p_model - log p_first, at the sampling "
    "temperature."
)
NOT_SAMPLED = (
    "Mean over the model's own responses of the sum over their tokens of log p_model - log p_first, in nats, "
    "at the sampling temperature. It is no estimate of the KL, because the responses were not sampled from "
    "the model's full distribution (greedy decoding, top_p, top_k or min_new_tokens)."
)
ScoreLists = dict[str, list[list[float]]]  # reward -> scores of the rows of each batch
Sections = Mapping[str, dict[str, Any]]  # reward -> its config section
Results = Sequence[dict[str, Any]]  # the rows of evaluation.jsonl
Scores = dict[str, dict[str, list[list[float]]]]  # reward -> model -> prompt -> score of each response


@dataclass(frozen=True)
class Comparison:
    """The result of ``evaluate``, the same on every rank."""

    summary: dict[str, Any]  # the content of evaluation.json
    # one per response to a prompt: the prompt, and each model's response and scores
    rows: list[dict[str, Any]]
    # of each model: generated tokens of all ranks, divided by the time of the slowest rank
    tokens_per_second: dict[str, float]


def evaluate(
    config: PPOConfig,
    world: World,
    models: Sequence[NamedModel],
    rewards: Sections,
    *,
    samples: int | None = None,
    judge: PairwiseJudge | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Compares ``models`` on the prompts of ``config``. All ranks must call this.

    All models are compared with the first one. Their settings are those of actor.model, except for the paths.
    ``rewards`` maps names to config sections. ``samples`` is the number of sampled responses to each prompt;
    None: one greedy response. ``note`` is called with lines about the progress.
    """
    readers = read_prompts(config, world, models, samples)
    check_functions(world, readers, rewards, judge)
    found = respond(config, world, models, readers, samples, note)
    scores = score_responses(config, world, found, rewards, note)
    rows, metadata = result_rows(found, scores)
    names = [model.name for model in models]
    if judge is not None:
        note(f"evaluation  pairs by {judge.path}")
        add_verdicts(rows, metadata, names, judge)
    everything = [row for part in world.gather_objects(rows) for row in part]
    everything.sort(key=lambda row: (row["number"], row["sample"]))
    summary = {
        "data": found[names[0]].reader.source.path,
        "prompts": len({row["number"] for row in everything}),
        "decoding": {
            "samples": samples or 1,
            "greedy": samples is None,
            "seed": config.run.seed,
            **config.sampling.model_dump(),
        },
        **summarize(everything, names, rewards, config.eval.correct_above),
        **divergence(everything, names, config.sampling, greedy=samples is None),
    }
    if by := config.eval.by:
        summary["by"] = {"column": by, "values": by_column(everything, names, rewards, by)}
    if judge is not None:
        summary["judge"] = judge_statistics(everything, names, judge.path)
    return Comparison(summary, everything, speeds(world, found))


def check_functions(
    world: World, readers: Mapping[str, Reader], rewards: Sections, judge: PairwiseJudge | None
) -> None:
    """Raises UserError if a reward or the judge fails on trial responses. All ranks must call this."""
    sections = {reward_key(name): section for name, section in rewards.items()}

    def check() -> None:
        for reader in {id(reader): reader for reader in readers.values()}.values():
            check_rewards(sections, reader)
            try_functions(sections, reader)
        if judge is not None:
            judge.try_on(next(iter(readers.values())).batches[0].prompts.metadata[0])

    # only on one rank, since a user's function may have side effects
    world.on_all(lambda: check() if world.is_main else None)


def reward_key(name: str) -> str:
    return name if name == "reward" else f"eval.rewards.{name}"


def score_responses(
    config: PPOConfig,
    world: World,
    found: Mapping[str, Responses],
    rewards: Sections,
    note: Callable[[str], None],
) -> dict[str, ScoreLists]:
    """Scores all responses; returns model -> reward -> scores of each batch. All ranks must call this.

    Each reward uses the tokenizer of the scored policy. Reward models are loaded once for all policies.
    """
    note = cache(note)  # rewards are loaded once per tokenizer; their equal lines are shown once
    load_frozen = RewardModels(world, note)
    given, temperature = config.memory.score_tokens, config.sampling.temperature
    budget = TokenBudget("score_tokens", CPU_LIMITS["score_tokens"] if given == "auto" else given)
    readers = {id(responses.reader): responses.reader for responses in found.values()}
    scorers: dict[tuple[str, int], Reward] = {}
    for name, section in rewards.items():
        note(f"evaluation  score by {name}")
        for key, reader in readers.items():
            scorers[name, key] = load_reward(
                section, reward_key(name), reader.tokenizer, temperature, world, load_frozen, budget, note
            )
    if given == "auto":
        shapes = [(model.shape, model.section.dtype) for model in load_frozen.loaded]
        longest = max(reader.longest for reader in readers.values())
        budget.tokens = largest_scoring(world, shapes, longest)

    def scores(name: str, responses: Responses) -> list[list[float]]:
        scorer = scorers[name, id(responses.reader)]
        try:
            return [scorer(rollout).sums.tolist() for rollout in responses.rollouts]
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a user's function may raise anything
            raise RunError(describe_failure(error)) from error

    return {model: {name: scores(name, responses) for name in rewards} for model, responses in found.items()}


def result_rows(
    found: Mapping[str, Responses], scores: Mapping[str, ScoreLists]
) -> tuple[list[dict[str, Any]], list[Row]]:
    """Returns this rank's rows of evaluation.jsonl, and the data set's row for each of them."""
    rows: list[dict[str, Any]] = []
    metadata: list[Row] = []
    batches = next(iter(found.values())).reader.batches
    for index, batch in enumerate(batches):
        for i in range(len(batch.prompts)) if batch.counted else ():
            data_row = batch.prompts.metadata[i]
            responses = {
                name: of_model.row(index, i)
                | {"scores": {reward: values[index][i] for reward, values in scores[name].items()}}
                for name, of_model in found.items()
            }
            rows.append(
                {
                    "number": batch.numbers[i],
                    "sample": batch.samples[i],
                    "prompt": data_row["prompt_text"],
                    "asked": last_message(data_row),
                    "columns": {key: value for key, value in data_row.items() if key not in PROMPT_COLUMNS},
                    "responses": responses,
                }
            )
            metadata.append(data_row)
    return rows, metadata


def add_verdicts(rows: Results, metadata: Sequence[Row], names: Sequence[str], judge: PairwiseJudge) -> None:
    """Adds the judge's verdicts to the responses of all models but the first."""
    prompts = [row["prompt"] for row in rows]
    texts = {name: [row["responses"][name]["response"] for row in rows] for name in names}
    for name in names[1:]:
        verdicts = judge(prompts, texts[name], texts[names[0]], metadata)
        for row, verdict in zip(rows, verdicts, strict=True):
            row["responses"][name]["judge"] = verdict


# ---- statistics


def by_prompt(rows: Results, name: str, get: Callable[[dict[str, Any]], Any]) -> list[list[Any]]:
    """Returns ``get(response)`` for each response of model ``name``, grouped by prompt."""
    groups: dict[int, list[Any]] = {}
    for row in rows:
        groups.setdefault(row["number"], []).append(get(row["responses"][name]))
    return list(groups.values())


def scores_by_prompt(rows: Results, names: Sequence[str], rewards: Collection[str]) -> Scores:
    """Returns the scores of ``rows``, grouped by prompt."""
    scores = {name: by_prompt(rows, name, itemgetter("scores")) for name in names}
    return {
        reward: {name: [[one[reward] for one in group] for group in given] for name, given in scores.items()}
        for reward in rewards
    }


def mean_of(rows: Results, name: str, get: Callable[[dict[str, Any]], float]) -> float:
    return sum(get(row["responses"][name]) for row in rows) / len(rows)


def summarize(
    rows: Results, names: Sequence[str], rewards: Collection[str], correct_above: float | None
) -> dict[str, Any]:
    """Returns the comparison by each reward, pass@k, and the lengths of the responses."""
    texts = {name: by_prompt(rows, name, itemgetter("response")) for name in names}
    scores = scores_by_prompt(rows, names, rewards)
    lengths = {
        name: {
            "tokens_mean": mean_of(rows, name, itemgetter("tokens")),
            "finished_frac": mean_of(rows, name, itemgetter("finished")),
        }
        for name in names
    }
    compared = {reward: compare(values, texts) for reward, values in scores.items()}
    passed = accuracy(scores, correct_above)
    return {"rewards": compared, "responses": lengths} | ({"pass_at_k": passed} if passed else {})


def by_column(rows: Results, names: Sequence[str], rewards: Collection[str], column: str) -> dict[str, Any]:
    """Returns the number of prompts and each model's mean scores for each value of a column."""
    found = {}
    for value, group in grouped(rows, column).items():
        means = {
            reward: {name: estimate(prompt_means(values)) for name, values in by_model.items()}
            for reward, by_model in scores_by_prompt(group, names, rewards).items()
        }
        found[value] = {"prompts": len({row["number"] for row in group}), "score": means}
    return found


def accuracy(scores: Scores, correct_above: float | None) -> dict[str, Any]:
    """Returns pass@k for each reward whose scores tell whether a response is correct.

    These are the first reward if ``correct_above`` is not None (higher scores are correct), and, with several
    responses to each prompt, all rewards whose scores are only 0 and 1.
    """
    found: dict[str, Any] = {}
    for position, (reward, by_model) in enumerate(scores.items()):
        groups = [group for prompts in by_model.values() for group in prompts]
        bound = correct_above if position == 0 else None
        if bound is None and len(groups[0]) > 1 and {score for group in groups for score in group} <= {0, 1}:
            bound = 0.5
        if bound is not None:
            passed = {
                name: pass_rates([[score > bound for score in group] for group in prompts])
                for name, prompts in by_model.items()
            }
            found[reward] = {"correct_above": bound, "models": passed}
    return found


def divergence(rows: Results, names: Sequence[str], sampling: SamplingConfig, greedy: bool) -> dict[str, Any]:
    """Returns the mean log-ratio of each model to the first; it estimates the KL if sampling is unmodified.

    Greedy decoding, top_p, top_k and min_new_tokens modify sampling. A remark names the models whose
    vocabulary differs from that of the first.
    """
    first, others = names[0], names[1:]
    measured = [name for name in others if "log_ratio" in rows[0]["responses"][name]]
    found: dict[str, Any] = {}
    if unknown := [name for name in others if name not in measured]:
        found["remarks"] = [
            f"no KL of {', '.join(unknown)} to {first}: it needs models with the same vocabulary"
        ]
    if not measured:
        return found
    exact = not greedy and sampling.top_p == 1 and not sampling.top_k and not sampling.min_new_tokens
    statistics: dict[str, Estimate] = {}
    for name in measured:
        ratios = by_prompt(rows, name, itemgetter("log_ratio"))
        tokens = sum(row["responses"][name]["tokens"] for row in rows)
        per_token = sum(map(sum, ratios)) / tokens
        statistics[name] = {**estimate(prompt_means(ratios)), "per_token": per_token}
    found["kl"] = {
        "name": "KL" if exact else "log ratio",
        "first": first,
        "estimator": SAMPLED if exact else NOT_SAMPLED,
        "temperature": sampling.temperature,
        "models": statistics,
    }
    return found


def judge_statistics(rows: Results, names: Sequence[str], path: str) -> dict[str, Any]:
    """Returns the judge's win rates of all models against the first one, and the judge's consistency."""
    found = {}
    for name in names[1:]:
        preferences = by_prompt(rows, name, lambda response: response["judge"]["preference"])
        found[name] = {
            "win_rate": estimate(prompt_means(preferences)),
            "position_bias": mean_of(rows, name, lambda response: response["judge"]["position_bias"]),
            "disagreement": mean_of(rows, name, lambda response: response["judge"]["disagrees"]),
        }
    return {"function": path, "first": names[0], "models": found}


def speeds(world: World, found: Mapping[str, Responses]) -> dict[str, float]:
    """Returns the generated tokens per second of each model. All ranks must call this."""
    mine = {}
    for name, responses in found.items():
        counted = zip(responses.reader.batches, responses.rollouts, strict=True)
        tokens = sum(int(rollout.response_mask.sum()) for batch, rollout in counted if batch.counted)
        mine[name] = tokens, responses.seconds
    everyone = world.gather_objects(mine)
    return {
        name: sum(rank[name][0] for rank in everyone) / max(rank[name][1] for rank in everyone)
        for name in mine
    }
