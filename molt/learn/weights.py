"""The policy's weights as they leave it: whole tensors under Hugging Face names, in the dtype that engines serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from molt.learn.claim import claim
from molt.learn.policy import SENT_DTYPES, Policy
from molt.rollout.engine import WeightSource
from molt.rollout.transfer import NcclSender, Offer, offer_ipc
from molt.rollout.weights import TensorFacts, checkpoint_names, facts_of, model_digest, write_weights


def stream(policy: Policy, *, shards: dict[str, torch.Tensor] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors as engines get them, one parameter after another, on the device; rank 0 gets them, the others give their shards.

    A collective that every rank goes through to its end. shards: as in Policy.stream.
    """
    is_first = dist.get_rank() == 0
    for (_, sent), tensor in _numbered(policy, lambda number: is_first, shards):
        yield sent, tensor


def _numbered(
    policy: Policy, is_mine: Callable[[int], bool], shards: dict[str, torch.Tensor] | None = None
) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
    """Tensors under (number of the parameter, checkpoint name), of the parameters whose numbers this rank takes."""
    lm = policy.scorer.lm
    adapter = getattr(lm, "state_dict_adapter", None)
    for number, (name, whole) in enumerate(policy.stream(SENT_DTYPES[policy.actor.dtype], shards=shards)):
        if is_mine(number):  # AutoModel keeps experts grouped; the checkpoint has them apart
            named = adapter.to_hf({name: whole}) if adapter is not None else checkpoint_names(lm, {name: whole})
            for sent, tensor in named.items():
                yield (number, sent), tensor.contiguous()


def sent_tensors(policy: Policy, *, is_on_device: bool = False) -> dict[str, torch.Tensor]:
    """All tensors as engines get them, on the CPU unless they are to stay on the device. A collective; other ranks than 0 get none."""
    return {name: tensor if is_on_device else tensor.cpu() for name, tensor in stream(policy)}


def sent_facts(policy: Policy) -> dict[str, TensorFacts]:
    """Shapes and digests of the tensors as they are sent, in that order; looked at once for each revision. A collective.

    Hashing is slower than gathering, so the ranks share it: each takes every so many-th parameter.
    """
    if policy.facts is None or policy.facts[0] != policy.revision:
        rank, size = dist.get_rank(), dist.get_world_size()
        parts: list[dict[tuple[int, str], TensorFacts] | None] = [None] * size
        dist.all_gather_object(parts, facts_of(_numbered(policy, lambda number: number % size == rank)))
        known = [item for part in parts if part is not None for item in part.items()]
        policy.facts = (policy.revision, {name: fact for (_, name), fact in sorted(known, key=lambda item: item[0][0])})
    return policy.facts[1]


def sent_digest(policy: Policy) -> str:
    """Model digest over the tensors as they are sent: equal to what an engine reports that took them. A collective."""
    return model_digest(digests(sent_facts(policy)))


def digests(facts: Mapping[str, TensorFacts]) -> dict[str, str]:
    """Digest of each tensor."""
    return {name: fact.digest for name, fact in facts.items()}


class Publisher:
    """Hands weights over to engines: through a file in shared memory, CUDA handles on the same GPU, or a broadcast to other GPUs.

    What engines read stays until the next version is published. A broadcast comes from the shards that every rank kept of the version,
    so that no rank ever holds the whole model on its GPU.
    """

    def __init__(
        self, policy: Policy, transport: str, *, gpus_per_engine: int = 1, host: str = "127.0.0.1", limit_s: float = 300.0
    ) -> None:
        """transport: file, ipc or nccl. host: this machine as engines reach it. limit_s: longest broadcast."""
        self.policy = policy
        self.transport = transport
        self.gpus_per_engine = gpus_per_engine
        self.host = host
        self.limit_s = limit_s
        self._claim: int | None = None
        """What holds the folder of weights as this process's own."""
        self._offer: Offer | None = None
        self._sender: NcclSender | None = None
        """On rank 0."""
        self._shards: dict[str, torch.Tensor] | None = None
        """This rank's part of the version that was published last for a broadcast."""

    def publish(self, version: int, folder: Path, engines: Sequence[str]) -> WeightSource | None:
        """Make a version ready. A collective; rank 0 returns where the weights are. engines: whom a broadcast will reach."""
        facts = sent_facts(self.policy)
        if self.transport == "nccl":
            self._shards = self.policy.shards(SENT_DTYPES[self.policy.actor.dtype])
            if dist.get_rank() != 0:
                return None
            self._sender = self._sender_to(engines)
            return self._sender.source(facts, policy_version=version)
        tensors = sent_tensors(self.policy, is_on_device=self.transport == "ipc")
        if dist.get_rank() != 0:
            return None
        if self.transport == "file":
            if self._claim is None:
                self._claim = claim(folder)
            return write_weights(tensors, policy_version=version, folder=folder, digests=digests(facts))
        self._offer = offer_ipc(tensors, policy_version=version, digests=digests(facts))
        return self._offer.source

    def publish_again(self, engines: Sequence[str]) -> WeightSource:
        """Rank 0: make the version that was published last ready for a broadcast to these engines."""
        assert self._sender is not None, "nothing was published for a broadcast"
        before, self._sender = self._sender, self._sender_to(engines)
        return before.source_by(self._sender)

    def send(self) -> None:
        """Broadcast what was published last (nccl), tensor by tensor from the shards of all ranks; the engines must be receiving meanwhile.

        A collective. Rank 0 returns when every engine has it and raises RefitError when that fails; the other ranks only give.
        """
        assert self._shards is not None, "nothing was published for a broadcast"
        tensors = stream(self.policy, shards=self._shards)
        if self._sender is not None:
            self._sender.send(tensors)
        for _ in tensors:
            pass

    def _sender_to(self, engines: Sequence[str]) -> NcclSender:
        """The group of exactly these engines: the one that is there, or a new one."""
        if self._sender is not None:
            if self._sender.engines == tuple(engines) and not self._sender.is_broken:
                return self._sender
            self._sender.close()
        return NcclSender(engines, gpus_per_engine=self.gpus_per_engine, host=self.host, limit_s=self.limit_s)
