"""The policy's weights as they leave it: whole tensors under Hugging Face names, in the dtype that engines serve."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from molt.learn.policy import SENT_DTYPES, Policy
from molt.rollout.engine import WeightSource
from molt.rollout.weights import checkpoint_names, digest_tensors, model_digest, write_weights


def sent_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    """Whole tensors as engines get them. A collective; every rank gets them all."""
    tensors = policy.full_tensors(SENT_DTYPES[policy.actor.dtype])
    adapter = getattr(policy.scorer.lm, "state_dict_adapter", None)
    if adapter is not None:  # AutoModel keeps experts grouped; the checkpoint has them apart
        return {name: tensor.contiguous() for name, tensor in adapter.to_hf(tensors).items()}
    return checkpoint_names(policy.scorer.lm, tensors)


def sent_digest(policy: Policy) -> str:
    """Model digest over the tensors as they are sent: equal to what an engine reports that took them. A collective."""
    tensors = sent_tensors(policy)
    digest = [model_digest(digest_tensors(tensors)) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(digest, src=0, device=policy.device)
    return digest[0]


def publish(policy: Policy, version: int, folder: Path) -> WeightSource | None:
    """Write the weights where engines of this host read them. A collective; rank 0 returns where they lie."""
    tensors = sent_tensors(policy)
    return write_weights(tensors, policy_version=version, folder=folder) if dist.get_rank() == 0 else None
