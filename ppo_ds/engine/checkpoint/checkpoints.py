"""Atomic checkpoints of a whole run: one folder holds all models and the state of the training loop.

    checkpoints/step_000010/{actor,critic}/...        engine/checkpoint/state.py
                            {ema,lagged}/...          weight copies, if the run keeps them
                            rng_rank_00000.safetensors
                            state.json                the state of the loop and the settings of the run
                            state.safetensors         the tensors of that state, by "part.key"
                            manifest.json             size and SHA-256 of every other file
    checkpoints/latest, checkpoints/best              files that contain the name of a folder

A folder is written as a draft (storage/drafts.py) and renamed once the files of every rank are on the disk.
All ranks must see the same file system. Resume takes the newest undamaged folder. ``latest`` and ``best`` are
only for users and other programs; after a kill they may contain the name of an older folder.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ppo_ds.config.text import show
from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.files import (
    CheckpointError,
    is_inside,
    on_all_ranks,
    on_main_rank,
    sha256,
    write_json,
    write_tensors,
)
from ppo_ds.engine.checkpoint.shards import FORMAT
from ppo_ds.engine.checkpoint.state import (
    load_model,
    load_weight_copy,
    model_bytes,
    save_model,
    save_weight_copy,
    weight_copy_bytes,
)
from ppo_ds.engine.rng import load_rng, save_rng
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import UserError, printable
from ppo_ds.storage.drafts import draft_path, fsync, publish_directory, remove_drafts, write_file
from ppo_ds.storage.reading import entries_from_elsewhere, read_checked, read_json, read_text

log = logging.getLogger(__name__)
# weight copy -> config key that switches it on; {} is the first of the trained models
COPY_KEYS = {"ema": "{}.ema.decay", "lagged": "algo.old_policy"}
NO_COPIES: Mapping[str, WeightCopy] = {}
STATE, TENSORS = "state.json", "state.safetensors"
OTHER_BYTES = 1024**2  # upper bound for all files except models and copies: random states and JSON


@dataclass(eq=False)
class Checkpoints:
    """Saves and loads the checkpoints of one run in the folder ``root``.

    All ranks must call every public method.
    """

    root: Path
    _: KW_ONLY
    world: World
    keep_last: int  # at least 1
    settings: Mapping[str, Any] | None = None  # of the run (JSON); stored in each saved checkpoint
    verified: set[Path] = field(init=False, default_factory=set)  # those that this process has verified

    def save(
        self,
        step: int,
        models: Mapping[str, TrainedModel],
        state: dict[str, Any],
        *,
        best: bool = False,
        copies: Mapping[str, WeightCopy] = NO_COPIES,
    ) -> Path:
        """Saves a checkpoint, forces it to the disk and then deletes old checkpoints.

        Only rank 0's ``state`` is saved. Its values are JSON; dicts among them may also contain tensors.
        ``copies`` are the run's weight copies, by the names in COPY_KEYS. Checkpoints of later steps, which
        exist only if the run was resumed from an older checkpoint, are deleted too. Raises CheckpointError on
        all ranks if any rank could not write; the new checkpoint is then removed entirely.
        """
        fault("checkpoint.before")
        final = self.root / f"step_{step:06d}"
        metadata = {
            "format": FORMAT,
            "step": step,
            "world_size": self.world.size,
            "models": sorted(models),
            "shadows": sorted(copies),
            "state": state,
            "settings": self.settings,
        }
        draft = self.world.gather_objects(draft_path(final))[0]  # rank 0's path, on all ranks
        try:
            on_main_rank(self.world, lambda: self._prepare(draft, models, copies))
            written: list[Path] = []
            for role, model in models.items():
                written += save_model(model, draft / role)
                fault(f"checkpoint.after_{role}")
            for name, copy in copies.items():
                written += save_weight_copy(copy, draft / name)
            written.append(on_all_ranks(self.world, lambda: save_rng(draft, self.world)))
            on_main_rank(self.world, lambda: write_tensors(draft / TENSORS, state_tensors(state)))
            on_main_rank(self.world, lambda: write_json(draft / STATE, metadata))
            written += [draft / TENSORS, draft / STATE] if self.world.is_main else []
            self._commit(draft, final, written)
        except CheckpointError as error:
            if self.world.is_main:
                shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(
                f"{final} was not written, older checkpoints are unchanged: {error}"
            ) from error
        on_main_rank(self.world, lambda: self._update_pointers(final, best))
        return final

    def check_disk_space(
        self, models: Mapping[str, TrainedModel], copies: Mapping[str, WeightCopy] = NO_COPIES, more: int = 0
    ) -> None:
        """Raises UserError if the disk has no space for a checkpoint and ``more`` bytes of an export."""
        shortage = self.world.gather_objects(self._shortage(models, copies, more))[0]
        if shortage:
            what = "checkpoint and export" if more else "a checkpoint"
            raise UserError(f"run.dir={self.root.parent}: no space for {what}: {shortage}")

    def latest(self) -> Path | None:
        """Returns the newest undamaged checkpoint, or None if there is none. Warns about newer damaged ones.

        Raises UserError if all are damaged, since a fresh start would delete data that may be recoverable.
        """
        damaged: dict[Path, str] = {}
        for path in self.world.gather_objects(step_folders(self.root))[0]:
            damage = self._damage(path)
            if not damage:
                self.verified.add(path)
                for skipped, reason in damaged.items() if self.world.is_main else ():
                    log.warning("checkpoint %s is damaged and skipped: %s", skipped, reason)
                return path
            damaged[path] = "; ".join(damage[:3])
        if damaged:
            listed = ", ".join(f"{path.name} ({reason})" for path, reason in damaged.items())
            raise UserError(
                f"run.resume=auto: all checkpoints in {self.root} are damaged: {listed}; "
                "start in another run.dir, or begin anew with run.resume=restart"
            )
        return None

    def settings_of(self, path: Path) -> dict[str, Any] | None:
        """Returns the settings in a verified checkpoint, or None if an older version of ppo_ds saved it."""
        return self._metadata(path).get("settings")

    def world_size_of(self, path: Path) -> int:
        """Returns the number of ranks of the run that saved a verified checkpoint."""
        return self._metadata(path)["world_size"]

    def verify(self, path: Path) -> None:
        """Raises UserError unless ``path``, a checkpoint that the user named, is complete and undamaged."""
        if not self.world.gather_objects(path.is_dir())[0]:
            existing = ", ".join(folder.name for folder in step_folders(self.root)) or "none"
            raise UserError(f"run.resume: no such folder: {path}; checkpoints in {self.root}: {existing}")
        damage = self._damage(path)
        if damage:
            raise UserError(
                f"run.resume: {path} is damaged: {'; '.join(damage[:3])}: "
                "use another, or run.resume=auto for the newest undamaged one"
            )
        self.verified.add(path)

    def load(
        self, path: Path, models: Mapping[str, TrainedModel], copies: Mapping[str, WeightCopy] = NO_COPIES
    ) -> dict[str, Any]:
        """Restores models, weight copies and random states and returns the state of the loop.

        Verifies ``path`` first unless this process has already verified it. If ``path`` is in ``root``,
        deletes old checkpoints as ``save`` does, but no later ones. Raises UserError if the run has other
        models or weight copies than the checkpoint.
        """
        if path not in self.verified:
            self.verify(path)
        metadata = self._metadata(path)
        if sorted(metadata["models"]) != sorted(models):
            saved = ", ".join(metadata["models"])
            raise UserError(
                f"run.resume: {path} holds {saved}, this run trains {', '.join(models)}: keep the algorithm"
            )
        problems = [
            f"run.resume: {path} holds {'no ' * (name in copies)}{name} weights, "
            f"this run keeps {'them' if name in copies else 'none'}: "
            f"keep {COPY_KEYS[name].format(next(iter(models)))} as it was"
            for name in sorted(set(metadata["shadows"]) ^ set(copies))
        ]
        if problems:
            raise UserError(*problems)
        for role, model in models.items():
            load_model(model, path / role)
        for name, copy in copies.items():
            load_weight_copy(copy, path / name)
        on_all_ranks(self.world, lambda: load_rng(path, self.world))
        folders, step = step_folders(self.root), metadata["step"]
        later = ", ".join(folder.name for folder in folders if step_of(folder) > step)
        if later and self.world.is_main:
            log.warning(
                "going back to %s: the next checkpoint replaces the later %s in %s", path, later, self.root
            )
        # old checkpoints may be left if the run was killed before pruning or checkpoint.keep_last is now
        # smaller
        if path.parent.resolve() == self.root.resolve():
            on_main_rank(self.world, lambda: self._prune(newest=path))
        return on_all_ranks(self.world, lambda: with_tensors(metadata["state"], path / TENSORS))

    def _metadata(self, path: Path) -> dict[str, Any]:
        return on_all_ranks(self.world, lambda: read_state(path))

    def _prepare(
        self, draft: Path, models: Mapping[str, TrainedModel], copies: Mapping[str, WeightCopy]
    ) -> None:
        remove_drafts(self.root)  # drafts of a run that was killed while saving
        shortage = self._shortage(models, copies)
        if shortage:
            raise OSError(shortage)
        draft.mkdir(parents=True)

    def _shortage(
        self, models: Mapping[str, TrainedModel], copies: Mapping[str, WeightCopy], more: int = 0
    ) -> str | None:
        """Returns an error text if the disk has no space for a checkpoint and ``more`` bytes, else None."""
        tensors = sum(map(model_bytes, models.values())) + sum(map(weight_copy_bytes, copies.values()))
        needed = tensors + OTHER_BYTES + more
        existing = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if free >= needed:
            return None
        return (
            f"it takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free in {self.root}: free some space, "
            "keep fewer with a smaller checkpoint.keep_last, or choose another run.dir"
        )

    def _commit(self, draft: Path, final: Path, written: list[Path]) -> None:
        """Writes the manifest and renames the folder, which makes the checkpoint visible.

        Each rank hashes the files that it has written itself.
        """

        def hash_files() -> dict[str, Any]:
            return {
                str(path.relative_to(draft)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
                for path in written
            }

        hashed = self.world.gather_objects(on_all_ranks(self.world, hash_files))
        files = {name: entry for entries in hashed for name, entry in entries.items()}
        fault("checkpoint.before_rename")

        def rename() -> None:
            write_json(draft / "manifest.json", {"format": FORMAT, "files": dict(sorted(files.items()))})
            for folder in [path for path in draft.iterdir() if path.is_dir()] + [draft]:
                fsync(folder)
            publish_directory(draft, final)  # replaces an older checkpoint of the step, perhaps a damaged one

        on_main_rank(self.world, rename)
        fault("checkpoint.after_rename")

    def _update_pointers(self, final: Path, best: bool) -> None:
        """Points ``latest`` (and ``best``) to the new checkpoint, then deletes later and old checkpoints."""
        write_file(self.root / "latest", f"{final.name}\n")
        if best:
            write_file(self.root / "best", f"{final.name}\n")
        fault("checkpoint.before_prune")
        later = [folder for folder in step_folders(self.root) if step_of(folder) > step_of(final)]
        if self._best() in [folder.name for folder in later]:
            (self.root / "best").unlink()
        for folder in later:
            mark_deleted(folder)
        self._prune(newest=final)

    def _prune(self, newest: Path) -> None:
        """Deletes checkpoints up to ``newest``, except the last ``keep_last`` of them and the best one."""
        best = self._best()
        folders = [folder for folder in step_folders(self.root) if step_of(folder) <= step_of(newest)]
        for folder in folders[self.keep_last :]:
            if folder.name != best:
                mark_deleted(folder)
        remove_drafts(self.root)

    def _best(self) -> str | None:
        pointer = self.root / "best"
        return read_text(pointer).strip() if pointer.exists() else None

    def _damage(self, path: Path) -> list[str]:
        own = damage_of(path, self.world.rank, self.world.size)
        return sorted({problem for problems in self.world.gather_objects(own) for problem in problems})


def damage_of(path: Path, rank: int = 0, size: int = 1) -> list[str]:
    """Returns a line for each problem with the files of the checkpoint ``path``, or [] if there is none.

    The files are divided among ``size`` ranks; reads only those of ``rank``. Not a collective.
    """
    if problems := list(map(printable, entries_from_elsewhere(path))):
        return problems
    try:
        manifest = read_json(path / "manifest.json")
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ["manifest.json is missing or unreadable"]
    if manifest.get("format") != FORMAT or STATE not in files:
        return [f"manifest.json has another format than {FORMAT}, or does not list {STATE}"]
    if outside := [name for name in files if not is_inside(name)]:
        return [f"manifest.json names {show(outside[0])}, which is not a file of the checkpoint"]
    for name in sorted(files)[rank::size]:
        expected_size, digest = files[name]
        try:
            found = (path / name).stat().st_size
            if found != expected_size:
                problems.append(f"{name} has {found} bytes instead of {expected_size}")
            elif sha256(path / name) != digest:
                problems.append(f"{name} has changed since it was written (its SHA-256 differs)")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error}")
    return list(map(printable, problems))


class _Progress(BaseModel):
    first_eval: dict[str, float] | None = None


class _Export(BaseModel):  # arguments of ScoreModel.save
    settings: dict[str, Any]
    pad_id: int


class _LoopState(BaseModel):
    progress: _Progress = _Progress()
    export: dict[str, _Export] = {}


class _State(BaseModel):  # other keys are not checked
    format: Literal[1]
    step: Annotated[int, Field(ge=0, lt=2**53)]
    world_size: Annotated[int, Field(ge=1)] = 1
    models: list[str]
    shadows: list[str]
    state: _LoopState
    settings: dict[str, Any] | None = None


def read_state(path: Path) -> dict[str, Any]:
    """Returns state.json of the checkpoint ``path``. Raises UserError for wrong types and values."""
    return read_checked(path / STATE, _State)


def state_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors in the parts of a state, keyed by "part.key", such as "difficulty.due"."""
    parts = {part: values for part, values in state.items() if isinstance(values, dict)}
    values = {f"{part}.{key}": value for part, values in parts.items() for key, value in values.items()}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def with_tensors(state: dict[str, Any], file: Path) -> dict[str, Any]:
    """Puts the tensors of ``file``, if it exists, into ``state``. Raises OSError if the file is damaged."""
    try:
        for name, tensor in load_file(file).items() if file.exists() else ():
            part, _, key = name.partition(".")
            state[part][key] = tensor
    except (SafetensorError, LookupError, TypeError) as error:
        raise OSError(f"{file}: is damaged: {error!r}; use another checkpoint") from error
    return state


def step_folders(root: Path) -> list[Path]:
    """Returns the folders step_NNNNNN in ``root``, newest first."""
    folders = [path for path in root.glob("step_*") if path.is_dir()]
    numbered = [path for path in folders if path.name.removeprefix("step_").isdecimal()]
    return sorted(numbered, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def mark_deleted(folder: Path) -> None:
    """Renames a folder to a draft, for ``remove_drafts``: a kill during its deletion then does no harm."""
    folder.rename(draft_path(folder))
