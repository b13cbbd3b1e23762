"""How much memory a run needs on a trainer's GPU, on an engine's and on a host: bytes by what holds them, from shapes and settings.

trainer   master weights, gradient and moments (float32, sharded) | whole layers while they compute | activations | log-probs of the head
engine    weights of its part | cache of keys and values
host      weights in shared memory | moments and weights that are offloaded; files are read in slices, straight to the GPU

Exact where it counts tensors that the code makes; activations are summed over what a layer keeps for its backward pass, in the manner of
Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models), for gated layers and for mixtures. What is
assumed has a constant here. Axes: L packed tokens of a micro-batch on one rank, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from molt.config import Config
from molt.model_shape import ModelShape

if TYPE_CHECKING:
    from molt.learn.meta import Eyes, Parameters

GIB = float(1 << 30)
CONTEXT_GIB = 1.5
"""Assumed: CUDA context, NCCL's buffers and workspaces of cuBLAS in one process."""
FRAGMENTED_SHARE = 0.05
"""Assumed: share of a trainer's memory that its allocator cannot use."""
ENGINE_WORK_GIB = 2.0
"""Assumed: activations of an engine's largest batch and its captured graphs."""
REFIT_GIB = 4.0
"""Assumed: two buffers of 1 GiB that a broadcast packs, and what is gathered ahead of them."""
TILES_AT_ONCE = 32
"""Of molt.rollout.vision."""
CHUNK_BYTES, CHUNK_FLOATS, KEPT_FLOATS = 1 << 30, 1 << 27, 1 << 28
"""Of molt.learn.fused_head, and of molt.learn.logprob on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One line of a bill."""

    what: str
    gib: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What one kind of place needs."""

    needs: tuple[Need, ...]

    @property
    def gib(self) -> float:
        """All of it."""
        return sum(need.gib for need in self.needs)


def trainer_bill(config: Config, shape: ModelShape, parameters: Parameters) -> Bill:
    """One trainer rank at its fullest: in the backward pass of the largest micro-batch, or in the update where the moments come for it."""
    fsdp, actor = config.fsdp, config.actor
    width = 2 if actor.dtype == "bfloat16" else 4
    local, copies = local_parameters(config, parameters), 1 + (config.algo.advantage.estimator == "gae")
    layer, root = _whole_layer(config, parameters), (parameters.embedding + parameters.head) / fsdp.tp_size
    tokens = config.train.micro_batch_tokens / fsdp.cp_size
    per_layer = kept_per_token(config, shape) * tokens
    kept = per_layer * shape.num_layers
    if actor.gradient_checkpointing:
        kept = per_layer + shape.num_layers * tokens * shape.hidden_size * width
    on_host = fsdp.offload == "full"
    eyes = parameters.eyes
    seeing = 0 if eyes is None else eyes.parameters
    learning = local * copies * (1 - seeing / parameters.total if actor.freeze_vision else 1)
    passing = [
        _whole_layers_need(config, layer=layer, root=root, seeing=seeing, num_layers=shape.num_layers),
        Need(
            what="activations", gib=kept / GIB, why=f"{tokens:.0f} tokens, {'checkpointed' if actor.gradient_checkpointing else 'all kept'}"
        ),
        Need(what="head", gib=head_bytes(config, shape, tokens) / GIB, why="log-probs of the vocabulary, and the head's gradient"),
        *([] if eyes is None else [image_need(config, eyes, shape)]),
    ]
    moments, moments_why = (0.0 if on_host else 8 * learning / GIB), "two of AdamW, float32"
    if fsdp.offload == "optimizer":  # those of one model come for its update, when what the pass took is free again
        moments = max(0.0, moments / copies - sum(need.gib for need in passing))
        moments_why += "; on the host but for the update, where they take this more than the pass did"
    needs = [
        Need(what="weights", gib=(0 if on_host else 4 * local * copies) / GIB, why=f"float32, {local / 1e9:.3g} x 10^9 on this rank"),
        Need(what="gradient", gib=(0 if on_host else 4 * learning) / GIB, why="float32, sharded like the weights"),
        Need(what="moments", gib=moments, why=moments_why),
        *passing,
        Need(what="context", gib=CONTEXT_GIB, why="assumed"),
    ]
    if config.algo.kl.coef > 0 and config.reference.placement == "colocated" and not config.reference.offload:
        needs.append(Need(what="reference", gib=4 * local / GIB, why="frozen, float32, sharded like the policy"))
    if config.vllm.weight_transfer == "ipc":
        needs.append(Need(what="refit", gib=width * parameters.total / GIB, why="all weights as they are sent, on the first rank"))
    elif config.vllm.weight_transfer == "nccl":
        sent = min(REFIT_GIB, width * parameters.total / GIB)
        needs.append(Need(what="refit", gib=sent, why="buffers of the broadcast and tensors gathered ahead, on the first rank"))
        if fsdp.offload == "none":
            needs.append(
                Need(what="published", gib=width * local / GIB, why="this rank's part of the version that engines may ask for again")
            )
    spare = FRAGMENTED_SHARE * sum(need.gib for need in needs)
    return Bill(needs=(*needs, Need(what="fragments", gib=spare, why="assumed")))


def _whole_layers_need(config: Config, *, layer: float, root: float, seeing: float, num_layers: int) -> Need:
    """Weights that are gathered at once, and gradients before they are summed over ranks. layer, root, seeing: parameters."""
    fsdp, width = config.fsdp, 2 if config.actor.dtype == "bfloat16" else 4
    gathered = 2 * layer if fsdp.reshard_after_forward else num_layers * layer
    waiting = num_layers * layer + root + (0 if config.actor.freeze_vision else seeing) if fsdp.defer_grad_sync else layer
    whose = "two layers and the embeddings" if fsdp.reshard_after_forward else "all layers"
    return Need(
        what="whole layers",
        gib=(width * (gathered + root + seeing + layer) + 4 * waiting) / GIB,
        why=f"{whose}, {'all gradients' if fsdp.defer_grad_sync else 'one gradient'}{', and the vision tower' if seeing else ''}",
    )


def image_need(config: Config, eyes: Eyes, shape: ModelShape) -> Need:
    """Pixels, features and activations of a micro-batch that is all images, no two of them alike.

    A frozen tower holds what one layer makes of a few tiles: input, norm, attention and its output, feed-forward before and after its
    activation. One that learns keeps this of all tiles for its backward pass, or under checkpointing the inputs of its layers.
    """
    actor = config.actor
    width = 2 if actor.dtype == "bfloat16" else 4
    tiles = config.train.micro_batch_tokens / eyes.features
    fixed = tiles * (4 * eyes.pixels + width * eyes.features * shape.hidden_size)
    of_a_layer = eyes.patches * width * (8 * eyes.hidden_size + 2 * eyes.intermediate_size)
    if actor.freeze_vision:
        moving, why = min(tiles, TILES_AT_ONCE) * of_a_layer, f"the tower looks at {TILES_AT_ONCE} together"
    elif actor.gradient_checkpointing:
        inputs = tiles * eyes.patches * eyes.num_layers * eyes.hidden_size * width
        moving, why = min(tiles, TILES_AT_ONCE) * of_a_layer + inputs, "the tower learns, checkpointed"
    else:
        moving, why = tiles * eyes.num_layers * of_a_layer, "the tower learns, all kept"
    return Need(what="images", gib=(fixed + moving) / GIB, why=f"{tiles:.0f} tiles in a micro-batch; {why}")


def loading_gib(config: Config, parameters: Parameters) -> float:
    """Float32 weights on a trainer's GPU while they are read: its shards, or the whole model where AutoModel alone shards nothing."""
    return 4 * (parameters.total if loads_whole(config, parameters) else local_parameters(config, parameters)) / GIB


def loads_whole(config: Config, parameters: Parameters) -> bool:
    """Whether each rank reads the whole model before it is sharded."""
    return parameters.eyes is None and config.actor.implementation != "hf" and config.fsdp.tp_size == 1 and config.fsdp.ep_size == 1


def local_parameters(config: Config, parameters: Parameters) -> float:
    """Parameters whose shard lies on one rank."""
    fsdp = config.fsdp
    shards = fsdp.num_ranks / (fsdp.replicas * fsdp.tp_size)
    if fsdp.ep_size > 1:  # AutoModel spreads experts over all ranks, replicas included
        return (parameters.total - parameters.experts) / shards + parameters.experts / fsdp.num_ranks
    return ((parameters.total - parameters.uncut) / fsdp.tp_size + parameters.uncut) / shards


def _whole_layer(config: Config, parameters: Parameters) -> float:
    """Parameters of one layer while it computes on one rank."""
    if config.fsdp.ep_size > 1:
        return parameters.layer - parameters.layer_experts + parameters.layer_experts / config.fsdp.ep_size
    return parameters.layer / config.fsdp.tp_size


def kept_per_token(config: Config, shape: ModelShape) -> float:
    """Bytes that one layer keeps of a token for its backward pass, without checkpointing.

    A norm: its input in float32, the same normed, and its output. Attention: q and k before and after their norms and their rotation, k
    and v repeated for all heads (under context parallelism of the whole micro-batch), the output and its copy. Feed-forward: gate, up, the
    activation and the product; for each expert of a token these, its input and its output. A sixth more than what was measured on small
    models (tests/learn/test_memory.py), since kernels share some of it.
    """
    fsdp, width = config.fsdp, 2 if config.actor.dtype == "bfloat16" else 4
    hidden, heads = shape.hidden_size, shape.num_heads * shape.head_dim / fsdp.tp_size
    groups = shape.num_kv_heads * shape.head_dim / fsdp.tp_size
    norm = hidden * (2 * width + 4)
    attention = (heads + groups) * (4 * width + 4) + heads * width * (2 + 2 * fsdp.cp_size)
    if shape.num_experts:
        # Every part computes its own experts of all tokens, with room for the choices of the others' beside them; under ep_size ranks have
        # other tokens, and as many choices on average.
        forward = float(shape.num_experts_per_token * (4 * shape.expert_size + 2 * hidden) * width)
    else:
        forward = 4 * shape.intermediate_size * width / fsdp.tp_size
    return 2 * norm + attention + forward


def head_bytes(config: Config, shape: ModelShape, tokens: float) -> float:
    """What the log-probs of the vocabulary need at least; more logits are kept for the backward pass where memory is free.

    On a GPU of its own: logits of one chunk in the model's dtype, which become their gradient in place, the float32 sum of the head's
    gradient and one product that is added to it. Under tensor parallelism: chunks in float32 (log-probs, their exponentials, gradient),
    those that wait for the backward pass, and the float32 sum.
    """
    width = 2 if config.actor.dtype == "bfloat16" else 4
    entries = shape.vocab_size / config.fsdp.tp_size
    if config.fsdp.tp_size == 1:
        return min(CHUNK_BYTES, width * tokens * entries) + (4 + width) * entries * shape.hidden_size
    whole = 4 * tokens * entries
    kept = whole if whole <= 4 * KEPT_FLOATS else 0.0
    return kept + 3 * 4 * min(CHUNK_FLOATS, tokens * entries) + 4 * entries * shape.hidden_size


def engine_bill(config: Config, shape: ModelShape, parameters: Parameters, gpu_gib: float) -> tuple[Bill, float]:
    """One GPU of an engine, and how many sequences of data.max_len its cache holds."""
    vllm = config.vllm
    dtype = config.actor.dtype if vllm.dtype == "auto" else vllm.dtype
    width = 2 if dtype == "bfloat16" else 4
    weights = width * parameters.total / vllm.tensor_parallel_size / GIB
    cache = vllm.kv_cache_space_gib
    if cache is None:
        cache = max(0.0, vllm.gpu_memory_utilization * gpu_gib - weights - ENGINE_WORK_GIB)
    per_token = 2 * shape.num_layers * max(1.0, shape.num_kv_heads / vllm.tensor_parallel_size) * shape.head_dim * width
    needs = (
        Need(what="weights", gib=weights, why=f"{dtype}, a share of 1/{vllm.tensor_parallel_size}"),
        Need(what="cache", gib=cache, why=f"{per_token / 1024:.0f} KiB a token"),
        Need(what="work", gib=ENGINE_WORK_GIB, why="assumed: activations and graphs"),
    )
    return Bill(needs=needs), cache * GIB / (per_token * config.data.max_len)


def host_bill(config: Config, parameters: Parameters, *, ranks_per_host: int) -> Bill:
    """One host: what its ranks hold beside their GPUs."""
    width = 2 if config.actor.dtype == "bfloat16" else 4
    local = local_parameters(config, parameters)
    needs = []
    if config.vllm.weight_transfer == "file":
        needs.append(Need(what="shared memory", gib=2 * width * parameters.total / GIB, why="two versions of the weights in /dev/shm"))
    if config.fsdp.offload != "none":
        share = 8 if config.fsdp.offload == "optimizer" else 16
        needs.append(Need(what="offloaded", gib=share * local * ranks_per_host / GIB, why=f"fsdp.offload={config.fsdp.offload}"))
    return Bill(needs=tuple(needs))
