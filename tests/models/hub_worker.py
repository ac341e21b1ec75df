"""One rank of test_hub_requests.py, which sends its rank to the Hub as its token."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import huggingface_hub
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.hub import HF_MODULES_CACHE

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.distributed.world import World, connect
from ppo_ds.errors import UserError
from ppo_ds.models.download import HubModel, download_files, download_weights
from ppo_ds.models.loading import code_arguments, config_of
from ppo_ds.models.policy import load_policy
from ppo_ds.models.tokenizer import load_tokenizer


def start(caches: list[str]) -> World:
    """Joins the ranks of two nodes or of one; each node has the cache of its number."""
    world = connect(timeout_minutes=30.0)
    os.environ["HF_TOKEN"] = f"rank{world.rank}"
    node = world.rank // int(os.environ["LOCAL_WORLD_SIZE"])
    huggingface_hub.constants.HF_HUB_CACHE = caches[node % len(caches)]
    return world


def load_everything() -> None:
    """Loads two models, one of which runs its own code, on all ranks: argv has the folders of the caches."""
    world = start(sys.argv[1:])
    download = [HubModel("actor.model.path", "org/plain", None), HubModel("k", "org/code", "main", True)]
    download_files(download, world)
    # no rank copies code while another rank imports it
    assert any(Path(HF_MODULES_CACHE).rglob("org/code/*/mine.py"))
    weights = []
    for model in (model_config("org/plain"), model_config("org/code", "main", trusted=True)):
        config = config_of(model, "key")
        load_tokenizer(model.path, model.revision, model.trust_remote_code)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(
                config, trust_remote_code=model.trust_remote_code, **code_arguments(model, config)
            )
    download_weights(download, world)
    for model in (model_config("org/plain"), model_config("org/code", "main", trusted=True)):
        policy = load_policy(model, temperature=1.0, key="key")
        weights.append(sum(float(p.sum()) for p in policy.parameters()))
    assert len(set(world.gather_objects(tuple(weights)))) == 1
    world.close()


def load_without_download() -> None:
    """Loads the models like a process without other ranks."""
    world = start(sys.argv[1:])
    load_tokenizer("org/plain")
    load_policy(model_config("org/plain"), temperature=1.0, key="key")
    world.close()


def end_with_one_error() -> None:
    """Downloads a model that does not exist: argv has the folder of the cache."""
    world = start(sys.argv[1:])
    try:
        download_files([HubModel("actor.model.path", "org/missing", None)], world)
    except UserError as error:
        assert len(error.problems) == 1 and "actor.model.path=org/missing: " in error.problems[0], error
        Path(sys.argv[1], f"error{world.rank}").write_text(error.problems[0])
    world.close()


def model_config(path: str, revision: str | None = None, trusted: bool = False) -> ModelConfig:
    return ModelConfig(path=path, revision=revision, trust_remote_code=trusted, dtype="fp32")
