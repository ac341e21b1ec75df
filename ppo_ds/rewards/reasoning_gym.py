"""Reward function of ``reward=reasoning_gym``: the verifiers of the tasks in the package reasoning-gym.

The verifiers expect answers of a certain form, and may raise or be slow for others. Therefore
``conf/reward/reasoning_gym.yaml`` calls this function in worker processes with a time limit.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from functools import cache
from typing import Any

from ppo_ds.background.values import NoResult, is_float32
from ppo_ds.errors import not_installed

try:
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import create_dataset
except ImportError as error:
    raise ImportError(not_installed("reasoning-gym", "reasoning-gym")) from error


def score(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Returns the scores from the verifiers of the rows' tasks, mostly from 0 to 1.

    The answer is the content of the response's last <answer>...</answer>, or without these tags, the whole
    response. Raises NoResult if a verifier raises or returns no finite number.
    """
    scores = []
    for response, row in zip(responses, rows, strict=True):
        if "reasoning_gym" not in row:
            raise ValueError("the row is not made by a task; set data.path=reasoning_gym:TASK")
        made, before = row["reasoning_gym"], response.rpartition("</answer>")[0]
        answer = before.rpartition("<answer>")[2] if "<answer>" in before else response
        task = task_of(row["task"], json.dumps(made["settings"], default=str))
        try:
            with redirect_stdout(io.StringIO()):
                found = float(task.score_answer(answer.strip(), made["entry"]))
        except Exception as error:  # raised by the verifier because of the response
            raise NoResult(f"gave no result: the verifier of {row['task']} raised {error!r}") from error
        if not is_float32(found):
            raise NoResult(f"gave no result: the verifier of {row['task']} returned {found}")
        scores.append(found)
    return scores


@cache
def task_of(name: str, settings: str) -> ProceduralDataset:
    """Returns the task ``name`` with its ``settings`` (JSON), which some verifiers read."""
    return create_dataset(name, **json.loads(settings))
