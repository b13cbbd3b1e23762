"""Checkpoints that name the log position that made them: model, optimizer, schedule and random states.

    write  into .partial-step-N  ->  fsync  ->  rename to step-N  ->  complete.json (last, by rename)
    find   the newest folder whose complete.json lists files that are all there under their digests; others are passed over in words

The state itself is torch's distributed checkpoint, so another number of ranks, spread in another way, can load it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from molt.errors import DataError, MoltError
from molt.learn import exchange
from molt.learn.policy import Policy

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""Moments and their settings by parameter: another layout has other groups of parameters."""
MARKER = "complete.json"
POSITION = "position.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where in the run and in its log a checkpoint stands."""

    step: int
    """Steps trained."""
    policy_version: int
    cursor: int
    """Largest lsn of segments taken in."""
    lsn_end: int
    """Largest lsn that the weights build on."""
    weights_digest: str
    num_updates: dict[str, int]
    """Updates made, by policy (actor, critic): the place in the schedule."""
    kl_coef: float | None = None
    """Coefficient of the divergence that the adaptive controller had reached; None without one."""


def save(root: Path, policies: dict[str, Policy], position: Position) -> Path:
    """Write one checkpoint under root; a collective. Returns its folder on every rank."""
    name = f"step-{position.step:08d}"
    final, partial = root / name, root / f".partial-{name}"
    with _told_when_refused(final):
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        with _optimizers_on_device(policies):
            dcp.save(_state(policies), checkpoint_id=partial)
        if dist.get_rank() == 0:
            (partial / POSITION).write_text(json.dumps(asdict(position), indent=1))
        dist.barrier()
        shares = exchange.gather({name: digest_of_file(partial / name) for name in _share(_files(partial))})
        if dist.get_rank() == 0:
            _publish(partial, final, {name: digest for share in shares for name, digest in share.items()})
        dist.barrier()
    return final


@contextmanager
def _told_when_refused(final: Path) -> Iterator[None]:
    """MoltError for a disk that takes no checkpoint; torch wraps what the ranks met into an error of its own."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        failures = list(getattr(error, "failures", {}).values())
        cause = failures[0][0] if failures else error
        said = str(cause).splitlines()[0] if str(cause) else ""
        raise MoltError(
            f"checkpoint {final.name} cannot be written to {final.parent} ({type(cause).__name__}: {said}); those before it are whole: "
            "free space or mend the rights, then molt train --resume RUN"
        ) from error


def load(folder: Path, policies: dict[str, Policy]) -> Position:
    """Put a complete checkpoint into the policies; a collective. Raises DataError for one that is not complete."""
    if (reason := incomplete(folder)) is not None:
        raise DataError(f"checkpoint {folder} is not complete: {reason}; load an older one")
    position = read_position(folder)
    with _optimizers_on_device(policies):
        _load_state(folder, policies, position)
    return position


def _load_state(folder: Path, policies: dict[str, Policy], position: Position) -> None:
    """Tensors of a complete checkpoint, and the random states that it has of this rank; a rank that is new keeps its seeded ones."""
    if absent := sorted(policies.keys() - position.num_updates.keys()):
        raise DataError(
            f"checkpoint {folder} holds no {absent[0]}: another estimator wrote it; set algo.advantage.estimator as it was then, "
            "or start from the exported model"
        )
    state = _state(policies, position.num_updates)
    known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    rng = {key: value for key, value in state.pop("rng").items() if f"rng.{key}" in known}
    for name in policies:
        if absent := [weight for weight in state[name]["model"] if f"{name}.model.{weight}" not in known]:
            raise DataError(
                f"checkpoint {folder} holds no {absent[0]} of {name} ({len(absent)} weights are absent): another class of model wrote it; "
                "set actor.implementation as it was then, or start from the exported model"
            )
        if absent := [moment for moment in state[name].get("optimizer", {}) if f"{name}.optimizer.{moment}" not in known]:
            raise DataError(
                f"checkpoint {folder} holds no {absent[0]} of {name}, which did not learn then; set actor.freeze_moe_router and "
                "actor.freeze_vision as they were, or start from the exported model"
            )
    dcp.load(state | ({"rng": rng} if rng else {}), checkpoint_id=folder)
    for name, policy in policies.items():
        set_model_state_dict(policy.scorer, state[name]["model"])
        policy.num_updates = position.num_updates[name]
        policy.revision += 1
        if "optimizer" in state[name]:
            set_optimizer_state_dict(policy.scorer, policy.optimizer, state[name]["optimizer"], options=BY_NAME)
    _set_rng(rng)


@contextmanager
def _optimizers_on_device(policies: dict[str, Policy]) -> Iterator[None]:
    """Moments beside their parameters while they are saved or loaded."""
    with ExitStack() as stack:
        for policy in policies.values():
            stack.enter_context(policy.optimizer_on_device())
        yield


def newest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint under root that is whole, None when there is none, and in words those passed over; a collective."""
    passed_over: list[str] = []
    for folder in sorted(root.glob("step-*"), reverse=True) if root.is_dir() else ():
        reason = damage(folder)
        if reason is None:
            return folder, passed_over
        passed_over.append(f"checkpoint {folder.name} is passed over: {reason}")
    return None, passed_over


def incomplete(folder: Path) -> str | None:
    """Why a folder is not a complete checkpoint; None when it is."""
    marker = folder / MARKER
    if not marker.is_file():
        return f"{MARKER} is missing"
    try:
        sizes: dict[str, int] = json.loads(marker.read_text())["files"]
    except (ValueError, KeyError, TypeError):
        return f"{MARKER} cannot be read"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
    return None


def damage(folder: Path) -> str | None:
    """Why a folder is not a whole checkpoint, to the last bit; None when it is. A collective: each rank reads its share of the files."""
    reason = incomplete(folder)
    if reason is None:
        digests: dict[str, str] = json.loads((folder / MARKER).read_text()).get("digests", {})
        changed = (name for name in _share(sorted(digests)) if digest_of_file(folder / name) != digests[name])
        reason = next((f"{name} does not hold what was written" for name in changed), None)
    return exchange.first_refusal(reason)


def digest_of_file(file: Path) -> str:
    """blake2b-128 hex of its bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _share(names: list[str]) -> list[str]:
    """Those of the files that this rank reads."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _files(folder: Path) -> list[str]:
    """Every file in it, by its path from there."""
    return [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]


def read_position(folder: Path) -> Position:
    """The position of a checkpoint."""
    return Position(**json.loads((folder / POSITION).read_text()))


def keep_newest(root: Path, keep: int, saved: Path) -> None:
    """Remove all but the newest complete checkpoints up to the one just saved, and what crashes left.

    Later ones were passed over when the run was taken up, or it would not stand here: they count for nothing.
    """
    folders = sorted((folder for folder in root.glob("step-*") if folder.name <= saved.name and incomplete(folder) is None), reverse=True)
    for folder in [*root.glob("step-*"), *root.glob(".partial-*")]:
        if folder not in folders[:keep]:
            shutil.rmtree(folder, ignore_errors=True)


def _state(policies: dict[str, Policy], num_updates: dict[str, int] | None = None) -> dict[str, Any]:
    """The tree that a checkpoint holds. num_updates: of the checkpoint that is about to be loaded."""
    state: dict[str, Any] = {"rng": _rng()}
    for name, policy in policies.items():
        state[name] = {"model": get_model_state_dict(policy.scorer)}
        # An optimizer that never stepped has no state; asking for it would make one and count it as a step.
        if (policy.num_updates if num_updates is None else num_updates[name]) > 0:
            state[name]["optimizer"] = get_optimizer_state_dict(policy.scorer, policy.optimizer, options=BY_NAME)
    return state


def _rng() -> dict[str, torch.Tensor]:
    """Random states of this rank."""
    rank = dist.get_rank()
    states = {f"cpu{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"cuda{rank}"] = torch.cuda.get_rng_state()
    return states


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    """Put them back."""
    for name, state in states.items():
        (torch.set_rng_state if name.startswith("cpu") else torch.cuda.set_rng_state)(state)


def _publish(partial: Path, final: Path, digests: dict[str, str]) -> None:
    """Make a written folder durable and give it its name; the marker comes last. digests: of its files."""
    for name in digests:
        sync(partial / name)
    sync(partial)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    sync(final.parent)
    marker = final / f".{MARKER}"
    marker.write_text(json.dumps({"files": {name: (final / name).stat().st_size for name in digests}, "digests": digests}))
    sync(marker)
    os.replace(marker, final / MARKER)
    sync(final)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
