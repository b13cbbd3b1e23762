"""The policy's weights as they leave it: whole tensors under Hugging Face names, in the dtype that engines serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from molt.learn.policy import SENT_DTYPES, Policy
from molt.rollout.engine import WeightSource
from molt.rollout.transfer import NcclSender, Offer, offer_ipc
from molt.rollout.weights import checkpoint_names, digest_tensors, model_digest, write_weights


def sent_tensors(policy: Policy, *, is_on_device: bool = False) -> dict[str, torch.Tensor]:
    """Whole tensors as engines get them, on the CPU unless they are to stay on the device. A collective; every rank gets them all."""
    tensors = policy.full_tensors(SENT_DTYPES[policy.actor.dtype], is_on_device=is_on_device)
    adapter = getattr(policy.scorer.lm, "state_dict_adapter", None)
    if adapter is not None:  # AutoModel keeps experts grouped; the checkpoint has them apart
        return {name: tensor.contiguous() for name, tensor in adapter.to_hf(tensors).items()}
    return checkpoint_names(policy.scorer.lm, tensors)


def sent_digest(policy: Policy) -> str:
    """Model digest over the tensors as they are sent: equal to what an engine reports that took them. A collective."""
    tensors = sent_tensors(policy)
    digest = [model_digest(_digests(policy, tensors)) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(digest, src=0, device=policy.device)
    return digest[0]


def _digests(policy: Policy, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Digest of each tensor as it is sent, made once for each revision of the weights."""
    if policy.digests is None or policy.digests[0] != policy.revision:
        policy.digests = (policy.revision, digest_tensors(tensors))
    return policy.digests[1]


class Publisher:
    """Hands weights over to engines: through a file in shared memory, CUDA handles on the same GPU, or a broadcast to other GPUs.

    What engines read stays until the next version is published.
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
        self._offer: Offer | None = None
        self._sender: NcclSender | None = None

    def publish(self, version: int, folder: Path, engines: Sequence[str]) -> WeightSource | None:
        """Make a version ready. A collective; rank 0 returns where the weights are. engines: whom a broadcast will reach."""
        tensors = sent_tensors(self.policy, is_on_device=self.transport != "file")
        if dist.get_rank() != 0:
            return None
        digests = _digests(self.policy, tensors)
        if self.transport == "file":
            return write_weights(tensors, policy_version=version, folder=folder, digests=digests)
        if self.transport == "ipc":
            self._offer = offer_ipc(tensors, policy_version=version, digests=digests)
            return self._offer.source
        self._sender = self._sender_to(engines)
        return self._sender.source(tensors, policy_version=version, digests=digests)

    def publish_again(self, engines: Sequence[str]) -> WeightSource:
        """Rank 0: make the version that was published last ready for a broadcast to these engines."""
        assert self._sender is not None, "nothing was published for a broadcast"
        before, self._sender = self._sender, self._sender_to(engines)
        return before.source_by(self._sender)

    def send(self) -> None:
        """Rank 0: broadcast what was published last (nccl). Returns when every engine has it; they must be receiving meanwhile."""
        assert self._sender is not None, "nothing was published for a broadcast"
        self._sender.send()

    def _sender_to(self, engines: Sequence[str]) -> NcclSender:
        """The group of exactly these engines: the one that is there, or a new one."""
        if self._sender is not None:
            if self._sender.engines == tuple(engines) and not self._sender.is_broken:
                return self._sender
            self._sender.close()
        return NcclSender(engines, gpus_per_engine=self.gpus_per_engine, host=self.host, limit_s=self.limit_s)
