"""Builds the site as in CI and asks its search the questions of new users.

The ranking is that of Material for MkDocs (the worker of its search): lunr without length normalization, with
a wildcard after each word; a page ranks as its best section.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

if not os.environ.get("CI"):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("lunr", reason="the extra docs is not installed")

ENOUGH = 18  # questions that must have the right page first
# A question may have several right pages.
QUESTIONS = {
    "how many GPUs for 7B": ("fit_and_speed",),
    "signature of a reward function": ("rewards",),
    "KL explodes": ("troubleshooting",),
    "loss is NaN": ("troubleshooting",),
    "reward goes up but answers get worse": ("troubleshooting",),
    "resume after preemption": ("troubleshooting", "operations", "recipes/slurm"),
    "own chat data": ("data",),
    "train a reward model, then use it": ("reward_models", "recipes/reward_model"),
    "GRPO without a critic": ("algorithms", "recipes/verifiable_maths"),
    "LoRA": ("fit_and_speed", "recipes/lora_one_gpu"),
    "vLLM": ("vllm",),
    "several nodes with Slurm": ("several_nodes", "recipes/slurm"),
    "push to the Hub": ("sharing",),
    "see samples": ("report",),
    "wandb offline": ("dashboards",),
    "compare two runs": ("report",),
    "batch and micro-batch": ("training", "fit_and_speed"),
    "prompts_per_step samples_per_prompt": ("training",),
    "stop early and keep the best": ("operations", "evaluation"),
    "what clipfrac means": ("metrics",),
}


class Search:
    """Ranks the pages of a built site."""

    def __init__(self, index: dict[str, Any]):
        from lunr.builder import Builder
        from lunr.stop_word_filter import stop_word_filter

        config = index["config"]
        assert config["pipeline"] == ["stopWordFilter"] and set(config["fields"]) == {"title", "text", "tags"}
        self.separator = re.compile(config["separator"])
        self.sections = {section["location"]: section for section in index["docs"]}
        builder = Builder()
        builder.b(0)
        builder.ref("location")
        builder.pipeline.add(stop_word_filter)
        for field in ("title", "text"):
            boost = config["fields"][field]["boost"]
            builder.field(field, boost, lambda section, field=field: self.words(section[field]))
        for section in index["docs"]:
            builder.add(section, {"boost": section.get("boost", 1)})
        self.index = builder.build()

    def words(self, text: str) -> list[str]:
        parts = self.separator.split(re.sub(r"<[^>]*>", " ", text))
        return [part.lower() for part in parts if part]

    def pages(self, question: str) -> list[str]:
        """Returns the pages that the search shows, best first."""
        terms = [re.sub(r"[+~^:*]", "", word) for word in self.words(question)]
        scores: dict[str, float] = {}
        for result in self.index.search(" ".join(f"{term}*" for term in terms)):
            found = result["match_data"].metadata
            matched = {term for term in terms if any(word.startswith(term) for word in found)}
            share = len(matched) / len(set(terms))
            page, _, section = result["ref"].partition("#")
            score = result["score"] * (1 + ((not section) + share) ** 2)
            name = page.removesuffix("/").removesuffix(".html")
            scores[name] = max(scores.get(name, 0.0), score)
        return sorted(scores, key=lambda name: -scores[name])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site; a link without a target, and a page that is not in the navigation, end the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def index(site: Path) -> dict[str, Any]:
    return json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))


def test_the_search_finds_the_right_page_first(index: dict[str, Any]) -> None:
    search = Search(index)
    found = {question: search.pages(question)[:3] or [""] for question in QUESTIONS}
    wrong = {question: pages for question, pages in found.items() if pages[0] not in QUESTIONS[question]}
    assert len(QUESTIONS) == 20 and len(QUESTIONS) - len(wrong) >= ENOUGH, wrong


def test_the_search_leaves_out_the_records_of_development(index: dict[str, Any]) -> None:
    locations = {section["location"] for section in index["docs"]}
    assert {"rewards/", "troubleshooting/"} <= locations
    assert not [location for location in locations if location.startswith("dev/")]
