"""Weights on the way from trainer to engines: digests, safetensors in shared memory, and names that both sides share.

    trainer: named_weights -> write_weights -> WeightSource        (one file, complete before it has its name)
    engine : read_weights(source) -> (name, tensor), each digest compared before the tensor is used
    driver : remove_weights(source) once every engine has taken it

A digest is over the bytes of one tensor in C order, in the dtype sent (molt.rollout.digest); a model digest over sorted names and digests.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from molt.errors import RefitError, SettingError
from molt.rollout.digest import Digester
from molt.rollout.engine import WeightSource

SHARED_MEMORY = Path("/dev/shm")
_SPARE_BYTES = 64 * 1024 * 1024
_TOGETHER_BYTES = 256 * 1024 * 1024
"""Tensors whose digests are taken by one launch."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of one tensor: of its bytes in C order, in its own dtype; see molt.rollout.digest."""
    return digest_tensors({"": tensor})[""]


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digest of each tensor by name."""
    digester = Digester()
    digester.note(tensors.items())
    return digester.take()


Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What is known of one tensor without holding it."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it, without its prefix."""
    size_bytes: int
    digest: str


def facts_of(tensors: Iterable[tuple[Key, torch.Tensor]]) -> dict[Key, TensorFacts]:
    """Facts of tensors that come one after another; those of a few are held at a time."""
    digester = Digester()
    facts: dict[Key, tuple[tuple[int, ...], str, int]] = {}
    held: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for number, (name, tensor) in enumerate(tensors):
        held.append((str(number), tensor))
        num_bytes += tensor.nbytes
        facts[name] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        if num_bytes >= _TOGETHER_BYTES:
            digester.note(held)
            held, num_bytes = [], 0
    digester.note(held)
    return {
        name: TensorFacts(shape=shape, dtype=dtype, size_bytes=size, digest=digest)
        for (name, (shape, dtype, size)), digest in zip(facts.items(), digester.take().values(), strict=True)
    }


def model_digest(digests: Mapping[str, str]) -> str:
    """blake2b-128 hex over `name digest` lines, sorted by name: one name for a whole set of weights."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its Hugging Face checkpoint; a tied tensor once, under its first name."""
    state: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in _tied_last(model):
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        state[name] = tensor.detach()
    return checkpoint_names(model, state)


def checkpoint_names(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under checkpoint names (fused experts are split as the checkpoint has them)."""
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        return dict(state)
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(state)))


def _tied_last(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """State in checkpoint order, with the names that are tied to others (an output head) at the end."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return sorted(model.state_dict().items(), key=lambda item: item[0] in tied)


_DRAFT = re.compile(r"(^|\.)(mtp|mtp_layers)\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_VISION = re.compile(r"(^|\.)(vision_model|vision_tower|visual)\.")


def draft_names(names: Iterable[str], num_layers: int) -> set[str]:
    """Tensors of a checkpoint that only a multi-token-prediction head uses: named for it, or of a layer beyond the model's last.

    No trainer has them, so no refit brings them: a draft head stays as it was loaded.
    """
    layers = {name: None if _VISION.search(name) else _LAYER.search(name) for name in names}
    return {name for name, layer in layers.items() if _DRAFT.search(name) or (layer is not None and int(layer[2]) >= num_layers)}


def size_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def write_weights(
    tensors: Mapping[str, torch.Tensor], *, policy_version: int, folder: Path, digests: Mapping[str, str] | None = None
) -> WeightSource:
    """Write one safetensors file that engines of this host read, with a digest for each tensor.

    digests: of exactly these tensors, where they are known already; wrong ones make every engine refuse the file.
    The file appears under its name when it is complete. A folder without room is a SettingError that says so.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    num_bytes = size_bytes(tensors.values())
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _SPARE_BYTES:
        raise SettingError(
            f"weights of {num_bytes / 2**20:.0f} MiB do not fit into {folder} ({free / 2**20:.0f} MiB free); "
            "give the machine a larger shared memory (docker: --shm-size) or a smaller model"
        )
    host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    path = folder / f"weights-{policy_version:08d}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(host, partial)
    os.replace(partial, path)
    return WeightSource(
        policy_version=policy_version,
        transport="file",
        path=str(path),
        digests=digest_tensors(host) if digests is None else dict(digests),
        options={"size_bytes": str(num_bytes)},
    )


def read_weights(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a file source in stored order; RefitError at the first that is missing, extra or differs from its digest."""
    from safetensors import SafetensorError, safe_open

    if source.transport != "file" or source.path is None:
        raise RefitError(f"transport={source.transport} cannot be read as a file; publish the weights with transport file")
    try:
        with safe_open(source.path, framework="pt") as stored:
            names = list(stored.keys())
            if set(names) != set(source.digests):
                raise RefitError(_names_differ(set(source.digests), set(names), source.path))
            for name in names:
                tensor = stored.get_tensor(name)
                found = tensor_digest(tensor)
                if found != source.digests[name]:
                    raise RefitError(f"{name} of version {source.policy_version}: digest {found}, sent as {source.digests[name]}")
                yield name, tensor
    except (OSError, SafetensorError) as error:
        raise RefitError(f"weights of version {source.policy_version} cannot be read from {source.path}: {error}") from error


def read_tensors(path: str, *, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a safetensors file, or of all of a model folder, in stored order and without comparing digests."""
    from safetensors import safe_open

    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [Path(path)]
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name not in without:
                    yield name, stored.get_tensor(name)


def tensor_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a safetensors file or a model folder, from the headers alone."""
    from safetensors import SafetensorError, safe_open

    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [Path(path)]
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as stored:
                shapes |= {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RefitError(f"weights cannot be read from {path}: {error}") from error
    return shapes


def check_shapes(expected: Mapping[str, tuple[int, ...]], sent: Mapping[str, tuple[int, ...]]) -> None:
    """RefitError at the first tensor whose shape is not the engine's."""
    for name, shape in sent.items():
        if name in expected and expected[name] != shape:
            raise RefitError(f"{name}: shape {shape} was sent, the engine has {expected[name]}")


def _names_differ(expected: set[str], found: set[str], where: str) -> str:
    missing, extra = sorted(expected - found), sorted(found - expected)
    return f"tensors of {where} differ from those sent: missing {missing[:3]} ({len(missing)}), unexpected {extra[:3]} ({len(extra)})"


def check_names(expected: Iterable[str], sent: Iterable[str], *, tied: Iterable[str] = ()) -> None:
    """RefitError unless exactly the engine's tensors were sent; a tied name may be sent or left out."""
    wanted, given, loose = set(expected), set(sent), set(tied)
    if wanted - given - loose or given - wanted - loose:
        raise RefitError(_names_differ(wanted - loose, given - loose, "the engine's model"))


def remove_weights(source: WeightSource) -> None:
    """Free the memory of a file source. Nothing happens when it is already gone."""
    if source.path is not None:
        Path(source.path).unlink(missing_ok=True)


def weights_folder(run: str, *, root: Path = SHARED_MEMORY) -> Path:
    """Where a run's weights pass through: shared memory when the host has it, else the given root."""
    return root / f"molt-{hashlib.blake2b(run.encode(), digest_size=6).hexdigest()}"
