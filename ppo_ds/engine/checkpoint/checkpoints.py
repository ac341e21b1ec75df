"""Checkpoints of a whole run: one folder for all models and the loop, complete or not there at all.

    checkpoints/step_000010/{actor,critic}/...        engine/checkpoint/state.py
                            {ema,lagged}/...          second sets of weights, where the run keeps them
                            rng_rank_00000.safetensors
                            state.json                what the loop wants to remember, and the settings of the run
                            manifest.json             size and SHA-256 of every other file
    checkpoints/latest, checkpoints/best              names of folders

A folder is written aside as ``.tmp_step_000010``, and renamed once every rank has its files on the disk. All ranks must see the same
file system. What counts is the newest sound folder; the pointers are for people and other programs, and may be one behind after a kill.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_ds.config.typed import show
from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.files import (
    CheckpointError,
    is_below,
    sha256,
    sync,
    together,
    write_json,
    write_pointer,
)
from ppo_ds.engine.checkpoint.state import (
    FORMAT,
    load_model,
    load_shadow,
    model_bytes,
    save_model,
    save_shadow,
    shadow_bytes,
)
from ppo_ds.engine.rng import load_rng, save_rng
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import UserError

log = logging.getLogger(__name__)
OLD = ".tmp_old_"
SHADOW_KEYS = {"ema": "actor.ema.decay", "lagged": "algo.old_policy"}  # what decides whether a run keeps one
NO_SHADOWS: Mapping[str, WeightCopy] = {}
REST_BYTES = 1024**2  # of a checkpoint: random states, JSON


class Checkpoints:
    """The folder ``root`` of one run. Every public method is a collective."""

    def __init__(
        self, root: Path, *, world: World, keep_last: int, settings: Mapping[str, Any] | None = None
    ):
        """``settings`` (JSON) of the run: each checkpoint remembers with which it was made."""
        assert keep_last >= 1
        self.root = root
        self.world = world
        self.keep_last = keep_last
        self.settings = settings
        self._sound: set[Path] = set()  # read and found undamaged by this process

    def save(
        self,
        step: int,
        models: Mapping[str, TrainedModel],
        state: dict[str, Any],
        *,
        best: bool = False,
        shadows: Mapping[str, WeightCopy] = NO_SHADOWS,
    ) -> Path:
        """``state`` (JSON) is rank 0's; ``shadows``: those of SHADOW_KEYS that the run keeps.

        When this returns, the checkpoint is on the disk, and older ones are pruned.
        Checkpoints of later steps go too: they belong to a future that was abandoned when the run went back.
        Raises CheckpointError on all ranks where any of them could not write; nothing of the new one is left then.
        """
        fault("checkpoint.before")
        final = self.root / f"step_{step:06d}"
        aside = self.root / f".tmp_{final.name}"
        try:
            together(self.world, lambda: self._prepare(aside, models, shadows))
            written: list[Path] = []
            for role, model in models.items():
                written += save_model(model, aside / role)
                fault(f"checkpoint.after_{role}")
            written += [
                path for name, shadow in shadows.items() for path in save_shadow(shadow, aside / name)
            ]
            about = {"models": sorted(models), "shadows": sorted(shadows), "state": state}
            written += together(self.world, lambda: self._write_loop_state(aside, step, about))
            self._commit(aside, final, written)
        except CheckpointError as error:
            if self.world.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"{final} was not written, older checkpoints are as they were: {error}"
            ) from error
        together(self.world, lambda: self._point_and_prune(final, best))
        return final

    def expect_room(
        self, models: Mapping[str, TrainedModel], shadows: Mapping[str, WeightCopy] = NO_SHADOWS
    ) -> None:
        """UserError where the disk has no room for the first checkpoint of this start."""
        shortage = self.world.gather_objects(self._shortage(models, shadows))[0]
        if shortage:
            raise UserError(f"run.dir={self.root.parent}: no room for a checkpoint: {shortage}")

    def latest(self) -> Path | None:
        """The newest that is complete and undamaged; the others above it are named in a warning. None where there are no checkpoints at all.

        UserError where all are damaged: to begin anew would throw away what may still be saved.
        """
        damaged: dict[Path, str] = {}
        for path in self.world.gather_objects(self._folders())[0]:
            damage = self._damage(path)
            if not damage:
                self._sound.add(path)
                for skipped, why in damaged.items() if self.world.is_main else ():
                    log.warning("checkpoint %s is damaged and skipped: %s", skipped, why)
                return path
            damaged[path] = "; ".join(damage[:3])
        if damaged:
            told = ", ".join(f"{path.name} ({why})" for path, why in damaged.items())
            raise UserError(
                f"run.resume=auto: no checkpoint in {self.root} is whole: {told}; start in another run.dir, or delete them to begin anew"
            )
        return None

    def settings_of(self, path: Path) -> dict[str, Any] | None:
        """Those that a checkpoint from ``latest`` or ``verify`` was made with; None in checkpoints older than this."""
        return self._about(path).get("settings")

    def ranks_of(self, path: Path) -> int:
        """How many made a checkpoint from ``latest`` or ``verify``."""
        return self._about(path)["world_size"]

    def verify(self, path: Path) -> None:
        """UserError unless ``path``, which the user asked for, is complete and undamaged."""
        if not self.world.gather_objects(path.is_dir())[0]:
            there = ", ".join(folder.name for folder in self._folders()) or "none"
            raise UserError(f"run.resume: no such folder: {path}; checkpoints in {self.root}: {there}")
        damage = self._damage(path)
        if damage:
            raise UserError(
                f"run.resume: {path} is damaged: {'; '.join(damage[:3])}: use another, or run.resume=auto for the newest good one"
            )
        self._sound.add(path)

    def load(
        self, path: Path, models: Mapping[str, TrainedModel], shadows: Mapping[str, WeightCopy] = NO_SHADOWS
    ) -> dict[str, Any]:
        """Restore models, shadows and random states; returns the loop's state. A ``path`` that is not from ``latest`` is verified first."""
        if path not in self._sound:
            self.verify(path)
        about = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if sorted(about["models"]) != sorted(models):
            raise UserError(
                f"run.resume: {path} holds {', '.join(about['models'])}, this run trains {', '.join(models)}: keep the algorithm"
            )
        _refuse_other_shadows(
            path, set(about.get("shadows", [])), set(shadows)
        )  # checkpoints that are older than shadows name none
        for role, model in models.items():
            load_model(model, path / role)
        for name, shadow in shadows.items():
            load_shadow(shadow, path / name)
        together(self.world, lambda: load_rng(path, self.world))
        later = [folder.name for folder in self._folders() if _step_of(folder) > about["step"]]
        if later and self.world.is_main:
            log.warning(
                "going back to %s: the next checkpoint replaces the later %s in %s",
                path,
                ", ".join(later),
                self.root,
            )
        if (
            path.parent.resolve() == self.root.resolve()
        ):  # what a kill has kept from being pruned, or a smaller checkpoint.keep_last lets go
            together(self.world, lambda: self._prune(older_than=path))
        return about["state"]

    def _about(self, path: Path) -> dict[str, Any]:
        return together(self.world, lambda: json.loads((path / "state.json").read_text(encoding="utf-8")))

    def _folders(self) -> list[Path]:
        """Newest first."""
        found = [
            path
            for path in self.root.glob("step_*")
            if path.is_dir() and path.name.removeprefix("step_").isdigit()
        ]
        return sorted(found, key=_step_of, reverse=True)

    def _prepare(
        self, aside: Path, models: Mapping[str, TrainedModel], shadows: Mapping[str, WeightCopy]
    ) -> None:
        if not self.world.is_main:
            return
        for leftover in self.root.glob(".tmp_*"):  # of a run that was killed while it saved
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        shortage = self._shortage(models, shadows)
        if shortage:
            raise OSError(shortage)
        aside.mkdir(parents=True)

    def _shortage(self, models: Mapping[str, TrainedModel], shadows: Mapping[str, WeightCopy]) -> str | None:
        """What is missing on the disk for one more checkpoint. Not a collective."""
        needed = (
            sum(map(model_bytes, models.values())) + sum(map(shadow_bytes, shadows.values())) + REST_BYTES
        )
        free = shutil.disk_usage(
            next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
        ).free
        if free >= needed:
            return None
        return (
            f"it takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free in {self.root}: make room, keep fewer with a smaller "
            "checkpoint.keep_last, or choose another run.dir"
        )

    def _write_loop_state(self, aside: Path, step: int, about: dict[str, Any]) -> list[Path]:
        written = [save_rng(aside, self.world)]
        if self.world.is_main:
            about = {
                "format": FORMAT,
                "step": step,
                "world_size": self.world.size,
                **about,
                "settings": self.settings,
            }
            write_json(aside / "state.json", about)
            written.append(aside / "state.json")
        return written

    def _commit(self, aside: Path, final: Path, written: list[Path]) -> None:
        """Each rank hashes what it wrote itself; the rename is the moment from which the checkpoint exists."""
        mine = together(
            self.world,
            lambda: {
                str(p.relative_to(aside)): {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in written
            },
        )
        files = {
            name: entry for entries in self.world.gather_objects(mine) for name, entry in entries.items()
        }
        fault("checkpoint.before_rename")
        together(self.world, lambda: self._rename(aside, final, files))
        fault("checkpoint.after_rename")

    def _rename(self, aside: Path, final: Path, files: dict[str, Any]) -> None:
        if not self.world.is_main:
            return
        write_json(aside / "manifest.json", {"format": FORMAT, "files": dict(sorted(files.items()))})
        for folder in [path for path in aside.iterdir() if path.is_dir()] + [aside]:
            sync(folder)
        if final.exists():  # saved again, or damaged and skipped
            _set_aside(final)
        aside.rename(final)
        sync(self.root)

    def _point_and_prune(self, final: Path, best: bool) -> None:
        if not self.world.is_main:
            return
        write_pointer(self.root / "latest", final.name)
        if best:
            write_pointer(self.root / "best", final.name)
        fault("checkpoint.before_prune")
        pointer, later = (
            self.root / "best",
            [folder for folder in self._folders() if _step_of(folder) > _step_of(final)],
        )
        if self._best() in [folder.name for folder in later]:
            pointer.unlink()
        for folder in later:
            _set_aside(folder)
        self._prune(older_than=final)

    def _prune(self, older_than: Path) -> None:
        """Of ``older_than`` and those before it, the last ``keep_last`` and the best stay."""
        if not self.world.is_main:
            return
        best = self._best()
        for folder in [folder for folder in self._folders() if _step_of(folder) <= _step_of(older_than)][
            self.keep_last :
        ]:
            if folder.name != best:
                _set_aside(folder)
        for folder in self.root.glob(f"{OLD}*"):
            shutil.rmtree(folder)

    def _best(self) -> str | None:
        """The name of its folder."""
        pointer = self.root / "best"
        return pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None

    def _damage(self, path: Path) -> list[str]:
        mine = damage_of(path, self.world.rank, self.world.size)
        return sorted({problem for problems in self.world.gather_objects(mine) for problem in problems})


def damage_of(path: Path, rank: int = 0, size: int = 1) -> list[str]:
    """What is wrong with the files of the checkpoint ``path``, of which each rank reads its share; [] for a sound one. Not a collective."""
    try:
        listed = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["files"]
        files = {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in listed.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ["manifest.json is missing or unreadable"]
    if outside := [name for name in files if not is_below(name)]:
        return [f"manifest.json names {show(outside[0])}, which is no file of the checkpoint"]
    return [
        what for name in sorted(files)[rank::size] if (what := _damage_of(path / name, name, files[name]))
    ]


def _refuse_other_shadows(path: Path, held: set[str], kept: set[str]) -> None:
    problems = [
        f"run.resume: {path} holds {f'no {name} weights' if name in kept else f'{name} weights'}, "
        f"this run keeps {'them' if name in kept else 'none'}: keep {SHADOW_KEYS[name]} as it was"
        for name in sorted(held ^ kept)
    ]
    if problems:
        raise UserError(*problems)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _set_aside(folder: Path) -> None:
    """Before it is deleted, so that a kill half way leaves no folder that looks like a checkpoint."""
    folder.rename(folder.with_name(f"{OLD}{folder.name}"))


def _damage_of(file: Path, name: str, expected: dict[str, Any]) -> str | None:
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        return (
            None
            if sha256(file) == expected["sha256"]
            else f"{name} is not what was written (its SHA-256 differs)"
        )
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"
