"""Compares models on the same prompts: responses of each model, scored by the same rewards and by a judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_ds.assemble.preflight import check_rewards, try_functions
from ppo_ds.assemble.reward_models import RewardModels, build_reward
from ppo_ds.config.schema import Config
from ppo_ds.data.prompts import PromptSource
from ppo_ds.distributed.world import World
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.planning.budgets import CPU_LIMITS, largest_scoring
from ppo_ds.ppo.evaluation import last_message
from ppo_ds.rewards.weighted import WeightedReward
from ppo_ds.run.token_budgets import TokenBudget
from ppo_ds.tools.comparison import Estimate, compare, estimate, pass_rates, prompt_means
from ppo_ds.tools.model_argument import NamedModel
from ppo_ds.tools.pairwise_judge import PairwiseJudge
from ppo_ds.tools.responses import Reader, Responses, read_prompts, respond
from ppo_ds.types import Reward, Row

# columns of a row that hold the prompt, or that data/prompts.py adds
PROMPT_COLUMNS = ("prompt", "messages", "conversations", "prompt_text", "data_source")
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


@dataclass(frozen=True)
class Comparison:
    """The result of ``evaluate``, the same on every rank."""

    summary: dict[str, Any]  # the content of evaluation.json
    # one per response to a prompt: the prompt, and each model's response and scores
    rows: list[dict[str, Any]]
    # of each model: generated tokens of all ranks, divided by the time of the slowest rank
    tokens_per_second: dict[str, float]


def evaluate(
    config: Config,
    world: World,
    models: Sequence[NamedModel],
    rewards: Mapping[str, dict[str, Any]],
    *,
    samples: int | None = None,
    judge: PairwiseJudge | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Compares ``models`` on the prompts of ``config``. A collective.

    Args:
        config: The config of a PPO run. Its data, memory settings and sampling settings are used. actor.model
            gives all settings of the models but their paths.
        models: The policies; all others are compared with the first one.
        rewards: Names and sections of the rewards that score the responses.
        samples: Number of sampled responses to each prompt; None: one greedy response.
        judge: Judges each pair of a model's response and the first model's response to the same prompt.
        note: Receives lines about the progress.
    """
    readers = read_prompts(config, world, models, samples)
    check_functions(world, readers, rewards, judge)
    found = respond(config, world, models, readers, samples, note)
    scores = score_responses(config, world, found, rewards, note)
    rows, metadata = result_rows(found, scores)
    if judge is not None:
        note(f"evaluation  pairs by {judge.path}")
        add_verdicts(rows, metadata, [model.name for model in models], judge)
    everything = [row for part in world.gather_objects(rows) for row in part]
    everything.sort(key=lambda row: (row["number"], row["sample"]))
    first = found[models[0].name].reader
    texts = {
        model.name: by_prompt(everything, model.name, lambda response: response["response"])
        for model in models
    }
    summary = {
        "data": first.source.path,
        "prompts": len({row["number"] for row in everything}),
        "decoding": {
            "samples": samples or 1,
            "greedy": samples is None,
            "seed": config.run.seed,
            **config.sampling.model_dump(),
        },
        "rewards": {reward: compare(values_of(everything, models, reward), texts) for reward in rewards},
        "responses": response_statistics(everything, models),
    }
    summary |= accuracy(everything, models, rewards, config.eval.correct_above)
    summary |= divergence(everything, models, config, greedy=samples is None)
    if judge is not None:
        summary["judge"] = judge_statistics(everything, models, judge)
    return Comparison(summary, everything, speeds(world, found))


def check_functions(
    world: World,
    readers: Mapping[str, Reader],
    rewards: Mapping[str, dict[str, Any]],
    judge: PairwiseJudge | None,
) -> None:
    """Raises UserError if a reward or the judge cannot work with the prompts, before models are loaded.

    Reward functions and the judge are called once, with trial responses. A collective.
    """
    sections = {reward_key(name): section for name, section in rewards.items()}

    def check() -> None:
        for reader in {id(reader): reader for reader in readers.values()}.values():
            inputs = PromptInputs(reader.tokenizer, reader.source)
            check_rewards(sections, inputs)
            try_functions(sections, inputs)
        if judge is not None:
            judge.try_on(next(iter(readers.values())).batches[0].prompts.metadata[0])

    # on one rank only, since a user's function may have side effects
    world.on_all(lambda: check() if world.is_main else None)


def reward_key(name: str) -> str:
    """Returns the config key of a reward."""
    return name if name == "reward" else f"eval.rewards.{name}"


@dataclass(frozen=True)
class PromptInputs:
    """The prompts as a model's tokenizer reads them, for the checks of rewards."""

    tokenizer: Tokenizer
    source: PromptSource

    def examples(self) -> list[tuple[str, Row]]:
        return self.source.examples()

    def check_rows(self, check: Callable[[Row], object]) -> None:
        self.source.check_rows(check)


def score_responses(
    config: Config,
    world: World,
    found: Mapping[str, Responses],
    rewards: Mapping[str, dict[str, Any]],
    note: Callable[[str], None],
) -> dict[str, ScoreLists]:
    """Scores all responses; returns model -> reward -> scores of each batch. A collective.

    Rewards get the tokenizer of the model that they score, and share their own models.
    """
    note = once(note)  # the same lines for each tokenizer
    load_frozen = RewardModels(world, note)
    score_tokens = config.memory.score_tokens
    score_budget = TokenBudget(
        "score_tokens", CPU_LIMITS["score_tokens"] if score_tokens == "auto" else score_tokens
    )
    readers = {id(responses.reader): responses.reader for responses in found.values()}
    scorers: dict[tuple[str, int], Reward] = {}
    for name, section in rewards.items():
        note(f"evaluation  score by {name}")
        for key, reader in readers.items():
            reward = build_reward(
                section,
                key=reward_key(name),
                tokenizer=reader.tokenizer,
                load_frozen=load_frozen,
                score_tokens=score_budget,
                all_reduce_max=world.max_int,
                reduce=world.sum,
                should_stop=lambda: False,
                note=note,
            )
            scorers[name, key] = reward.evaluate if isinstance(reward, WeightedReward) else reward
    if score_tokens == "auto":
        shapes = [(model.shape, model.section.dtype) for model in load_frozen.loaded]
        longest = max(reader.longest for reader in readers.values())
        score_budget.set(largest_scoring(world, shapes, longest))
    return {
        model: {
            name: [
                scorers[name, id(responses.reader)](rollout).sums.tolist() for rollout in responses.rollouts
            ]
            for name in rewards
        }
        for model, responses in found.items()
    }


def once(note: Callable[[str], None]) -> Callable[[str], None]:
    """Returns ``note`` without repeated lines."""
    seen = set[str]()

    def note_new(line: str) -> None:
        if line not in seen:
            seen.add(line)
            note(line)

    return note_new


def result_rows(
    found: Mapping[str, Responses], scores: Mapping[str, ScoreLists]
) -> tuple[list[dict[str, Any]], list[Row]]:
    """Returns this rank's rows of evaluation.jsonl, and for each of them the row of the data set."""
    rows: list[dict[str, Any]] = []
    metadata: list[Row] = []
    batches = next(iter(found.values())).reader.batches
    for index, batch in enumerate(batches):
        for i in range(len(batch.prompts)) if batch.counted else ():
            data_row = batch.prompts.metadata[i]
            responses = {
                name: {
                    **response_row(of_model, index, i),
                    "scores": {reward: values[index][i] for reward, values in scores[name].items()},
                }
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


def response_row(responses: Responses, batch: int, i: int) -> dict[str, Any]:
    """Returns text and figures of one response. ``log_ratio`` is its sum of log pi / pi_first."""
    rollout = responses.rollouts[batch]
    ids = rollout.response_ids[i][rollout.response_mask[i]].tolist()
    row = {
        "response": responses.reader.tokenizer.decode(ids),
        "tokens": len(ids),
        "finished": bool(rollout.finished[i]),
    }
    if responses.first_logprobs:
        own, first = responses.logprobs[batch][i], responses.first_logprobs[batch][i]
        log_ratio = (own.double() - first.double()).masked_fill(~rollout.response_mask[i], 0.0)
        row["log_ratio"] = float(log_ratio.sum())
    return row


def add_verdicts(
    rows: Sequence[dict[str, Any]], metadata: Sequence[Row], names: Sequence[str], judge: PairwiseJudge
) -> None:
    """Adds the judge's verdicts to the responses of all models but the first."""
    prompts = [row["prompt"] for row in rows]
    texts = {name: [row["responses"][name]["response"] for row in rows] for name in names}
    for name in names[1:]:
        verdicts = judge(prompts, texts[name], texts[names[0]], metadata)
        for row, verdict in zip(rows, verdicts, strict=True):
            row["responses"][name]["judge"] = {
                "preference": verdict.preference,
                "position_bias": verdict.position_bias,
                "disagrees": verdict.disagrees,
            }


# ---- statistics


def by_prompt(
    rows: Sequence[dict[str, Any]], name: str, get: Callable[[dict[str, Any]], Any]
) -> list[list[Any]]:
    """Returns a value of each response of a model, grouped by prompt. ``rows`` are sorted by prompt."""
    groups: dict[int, list[Any]] = {}
    for row in rows:
        groups.setdefault(row["number"], []).append(get(row["responses"][name]))
    return list(groups.values())


def values_of(
    rows: Sequence[dict[str, Any]], models: Sequence[NamedModel], reward: str
) -> dict[str, list[list[float]]]:
    """Returns the scores by a reward: model -> prompt -> response."""
    return {
        model.name: by_prompt(rows, model.name, lambda response: response["scores"][reward])
        for model in models
    }


def response_statistics(rows: Sequence[dict[str, Any]], models: Sequence[NamedModel]) -> dict[str, Any]:
    """Returns the mean length and the share of finished responses of each model."""
    return {
        model.name: {
            "tokens_mean": sum(row["responses"][model.name]["tokens"] for row in rows) / len(rows),
            "finished_frac": sum(row["responses"][model.name]["finished"] for row in rows) / len(rows),
        }
        for model in models
    }


def accuracy(
    rows: Sequence[dict[str, Any]],
    models: Sequence[NamedModel],
    rewards: Mapping[str, Any],
    correct_above: float | None,
) -> dict[str, Any]:
    """Returns pass@k by each reward whose scores tell correct from wrong responses.

    This is the first reward if ``correct_above`` is given, and with several responses to a prompt each reward
    whose scores are all 0 or 1.
    """
    found: dict[str, Any] = {}
    for position, reward in enumerate(rewards):
        values = values_of(rows, models, reward)
        scores = {score for prompts in values.values() for group in prompts for score in group}
        bound = correct_above if position == 0 else None
        if bound is None and scores <= {0.0, 1.0} and len(rows) > len(next(iter(values.values()))):
            bound = 0.5
        if bound is not None:
            passed = {
                name: pass_rates([[score > bound for score in group] for group in prompts])
                for name, prompts in values.items()
            }
            found[reward] = {"correct_above": bound, "models": passed}
    return {"pass_at_k": found} if found else {}


def divergence(
    rows: Sequence[dict[str, Any]], models: Sequence[NamedModel], config: Config, greedy: bool
) -> dict[str, Any]:
    """Returns the KL of each model to the first one, estimated from the model's own responses.

    With other than full sampling, the same number is no estimate of the KL and has another name.
    """
    sampling, first = config.sampling, models[0].name
    measured = [model.name for model in models[1:] if "log_ratio" in rows[0]["responses"][model.name]]
    other = [model.name for model in models[1:] if model.name not in measured]
    found: dict[str, Any] = {}
    if other:
        found["remarks"] = [
            f"no KL of {', '.join(other)} to {first}: it needs models with the same vocabulary"
        ]
    if not measured:
        return found
    exact = not greedy and sampling.top_p == 1 and not sampling.top_k and not sampling.min_new_tokens
    statistics: dict[str, Estimate] = {}
    for name in measured:
        ratios = by_prompt(rows, name, lambda response: response["log_ratio"])
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


def judge_statistics(
    rows: Sequence[dict[str, Any]], models: Sequence[NamedModel], judge: PairwiseJudge
) -> dict[str, Any]:
    """Returns the win rates of all models against the first one by the judge, and its consistency."""
    found = {}
    for model in models[1:]:
        verdicts = [row["responses"][model.name]["judge"] for row in rows]
        preferences = by_prompt(rows, model.name, lambda response: response["judge"]["preference"])
        found[model.name] = {
            "win_rate": estimate(prompt_means(preferences)),
            "position_bias": sum(verdict["position_bias"] for verdict in verdicts) / len(verdicts),
            "disagreement": sum(verdict["disagrees"] for verdict in verdicts) / len(verdicts),
        }
    return {"function": judge.path, "first": models[0].name, "models": found}


def speeds(world: World, found: Mapping[str, Responses]) -> dict[str, float]:
    """Returns the generated tokens per second of each model. A collective."""
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
