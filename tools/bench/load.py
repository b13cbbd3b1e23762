"""Memory and time to load a model into sharded ranks: whole in every rank and then sharded, against each rank its own part.

    python -m tools.bench.load [--hidden 1024] [--layers 18] [--vocab 32768] [--ranks 2] [--dtype bfloat16]

The model is made with random weights and written in --dtype; ranks hold float32. Peak is the largest sum of anonymous pages of a
rank beyond those that it had before, looked at every 2 ms: pages of the mapped file belong to the page cache, which all ranks share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from molt.config import ActorSettings, FsdpSettings
from molt.learn.mesh import make_mesh
from molt.learn.model import load_model
from molt.learn.policy import shard

MIB = 1 << 20


def main() -> None:
    """Load both ways and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = make_model(Path(folder) / "model", options)
        print(json.dumps({"float32_mib": num_parameters * 4 // MIB, "ranks": options.ranks} | both(Path(folder), options.ranks), indent=1))


def both(folder: Path, num_ranks: int) -> dict[str, Any]:
    """What each way took, and whether it gave the same bits."""
    found = {}
    for name, is_deferred in (("whole", False), ("by_shard", True)):
        mp.spawn(_rank, (num_ranks, str(folder), is_deferred), nprocs=num_ranks)
        found[name] = [json.loads((folder / f"{is_deferred}-{rank}.json").read_text()) for rank in range(num_ranks)]
    is_equal = [rank.pop("digest") for rank in found["whole"]] == [rank.pop("digest") for rank in found["by_shard"]]
    return {**found, "is_equal": is_equal}


def make_model(folder: Path, options: argparse.Namespace) -> int:
    """A dense model with random weights; its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )
    lm = Qwen3ForCausalLM(config).to(getattr(torch, options.dtype))
    lm.save_pretrained(folder)
    return sum(parameter.numel() for parameter in lm.parameters())


def _rank(rank: int, size: int, folder: str, is_deferred: bool) -> None:
    """Load, shard, and write down peak, what is held afterwards, seconds, and a digest of the shards."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{is_deferred}", size), rank=rank, world_size=size)
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - its memory is not the model's

    actor, fsdp = ActorSettings(implementation="hf"), FsdpSettings(num_ranks=size)
    mesh = make_mesh(fsdp, "cpu")
    began = time.monotonic()
    with _watched() as seen:
        scorer = shard(load_model(f"{folder}/model", actor, fsdp, is_deferred=is_deferred), actor, fsdp, mesh)
    digest = hashlib.blake2b()
    for parameter in scorer.parameters():
        digest.update(parameter.to_local().detach().numpy().tobytes())
    facts = {**seen, "seconds": round(time.monotonic() - began, 2), "digest": digest.hexdigest()}
    Path(f"{folder}/{is_deferred}-{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _watched() -> Iterator[dict[str, Any]]:
    """Peak and remaining anonymous memory of the body, in MiB."""
    before, peak, is_over = _anonymous(), [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.002):
            peak[0] = max(peak[0], _anonymous())

    watcher = threading.Thread(target=look)
    watcher.start()
    seen: dict[str, Any] = {}
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()
        seen |= {"peak_mib": (max(peak[0], _anonymous()) - before) // MIB, "held_mib": (_anonymous() - before) // MIB}


def _anonymous() -> int:
    """Bytes of anonymous pages of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


if __name__ == "__main__":
    main()
