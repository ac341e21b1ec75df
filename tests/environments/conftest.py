"""Fixtures for tests of environments: one rank, a character tokenizer and a scripted decode backend."""

from types import SimpleNamespace

import pytest
import torch

from ppo_ds.data.prompts import collate_prompts
from ppo_ds.environments.calls import CallPool
from ppo_ds.environments.multi_turn import MultiTurnGenerator
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.rollout.base import SamplingParams, truncate_at_stop

END = 1  # the end token of character_tokenizer


@pytest.fixture
def world():
    """Stands in for a World of one rank."""
    return SimpleNamespace(
        rank=0,
        size=1,
        data_rank=0,
        data_size=1,
        sequence=None,
        sequence_ranks=1,
        sequence_argument={},
        is_main=True,
        device=torch.device("cpu"),
        max_int=int,
        sum=lambda x: x,
        sum_of_shares=lambda x: x,
        max=lambda x: x,
        concat=lambda x: x,
        gather_objects=lambda item: [item],
    )


@pytest.fixture
def tokenizer():
    return character_tokenizer("0123456789+=?>!abc ")


class Scripted:
    """Stands in for a decode backend: answers each prompt with the next text of a script, and an end token.

    The script maps the text of the whole prompt so far to the answer. Texts without an end token are marked
    by a trailing tilde, and fill the limit. The log-prob of token i of an answer is -(i + 1) / 8.
    """

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.calls = tokenizer, script, []

    def __call__(self, prompts, sampling):
        texts = [
            self.tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False)
            for ids, mask in zip(prompts.ids, prompts.mask, strict=True)
        ]
        self.calls.append(texts)
        rows = []
        for text in texts:
            answer = self.script.get(text, "!")
            (ids,) = self.tokenizer.encode_many([answer.removesuffix("~")], special_tokens=False)
            rows.append(ids if answer.endswith("~") else [*ids, END])
        width = max(map(len, rows))
        responses = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        logprobs = -(torch.arange(width) + 1).expand(len(rows), width) / 8
        return truncate_at_stop(
            prompts,
            responses,
            logprobs,
            sampling=sampling,
            tokenizer=self.tokenizer,
            lengths=torch.tensor([len(row) for row in rows]),
        ).trimmed()


def sampling_of(max_new_tokens, **changes):
    neutral = dict(min_new_tokens=0, temperature=1.0, top_p=1.0, top_k=0, stop_token_ids=(END,))
    return SamplingParams(max_new_tokens, **{**neutral, "stop_strings": (), **changes})


@pytest.fixture
def prompts_of(tokenizer):
    """Makes Prompts of texts."""

    def make(*texts, limit=100, **columns):
        encoded = tokenizer.encode_many(list(texts), special_tokens=False)
        return collate_prompts(
            [
                (ids, limit, {"prompt_text": text, **columns})
                for ids, text in zip(encoded, texts, strict=True)
            ],
            tokenizer.pad_id,
        )

    return make


@pytest.fixture
def generator_of(tokenizer, world):
    """Makes a MultiTurnGenerator of an environment class and a backend, or a script."""

    def make(environment, backend, max_turns=4, workers=2, timeout_seconds=60.0, **changes):
        if isinstance(backend, dict):
            backend = Scripted(tokenizer, backend)
        settings = dict(
            backend=backend,
            make_environment=environment,
            independent=False,
            read_calls=None,
            max_turns=max_turns,
            max_prompt_tokens=50,
            pool=CallPool(workers, timeout_seconds),
            tokenizer=tokenizer,
            world=world,
            check=lambda: None,
        )
        return MultiTurnGenerator(**settings | changes)

    return make
