"""Which layouts of ranks there are: sizes that make up the ranks, that divide the model, and that the mechanisms can carry out."""

from __future__ import annotations

from collections.abc import Iterator

from molt.config import Config
from molt.model_shape import ModelShape


def layout_findings(config: Config) -> Iterator[str]:
    """What of the layout cannot be, known from the settings alone."""
    fsdp, implementation = config.fsdp, config.actor.implementation
    unit = fsdp.group_size * fsdp.replicas
    if fsdp.num_ranks % unit:
        yield (
            f"fsdp.num_ranks={fsdp.num_ranks} needs to be a multiple of fsdp.tp_size={fsdp.tp_size} x fsdp.cp_size={fsdp.cp_size} x "
            f"fsdp.replicas={fsdp.replicas}; set it to {max(1, fsdp.num_ranks // unit) * unit}"
        )
    if fsdp.num_ranks % fsdp.ep_size:
        yield f"fsdp.ep_size={fsdp.ep_size} needs to divide fsdp.num_ranks={fsdp.num_ranks}; set fsdp.num_ranks={fsdp.ep_size}"
    if fsdp.ep_size > 1 and fsdp.tp_size > 1:
        yield (
            f"fsdp.ep_size={fsdp.ep_size} with fsdp.tp_size={fsdp.tp_size}, experts are shared by one or the other: "
            "tp_size to ranks with the same tokens, ep_size to ranks with other ones; set one of them to 1"
        )
    elif fsdp.ep_size > 1 and implementation == "hf":
        yield (
            f"fsdp.ep_size={fsdp.ep_size} needs actor.implementation=automodel, got hf; "
            "set actor.implementation=automodel or fsdp.ep_size=1"
        )
    elif fsdp.tp_size > 1 and implementation == "automodel":
        yield (
            f"fsdp.tp_size={fsdp.tp_size} needs actor.implementation=hf, got automodel, whose plans leave experts whole; "
            "set actor.implementation=hf or fsdp.tp_size=1"
        )
    if fsdp.ep_size > 1 and fsdp.offload == "full":
        yield f"fsdp.offload=full does nothing with fsdp.ep_size={fsdp.ep_size}, AutoModel places the weights; set fsdp.offload=optimizer"
    if fsdp.cp_size > 1 and fsdp.attn_implementation != "sdpa":
        yield (
            f"fsdp.cp_size={fsdp.cp_size} needs fsdp.attn_implementation=sdpa, got {fsdp.attn_implementation}, which cannot look into the "
            "rows of other slices; set it to sdpa or fsdp.cp_size=1"
        )
    if fsdp.tp_size > 1 and fsdp.attn_implementation == "te":
        yield f"fsdp.attn_implementation=te needs fsdp.tp_size=1, got {fsdp.tp_size}; set fsdp.attn_implementation=sdpa"


def model_findings(config: Config, shape: ModelShape) -> Iterator[str]:
    """What of the layout the model's shape does not allow."""
    fsdp, vllm = config.fsdp, config.vllm
    counts = {"attention heads": shape.num_heads, "key-value heads": shape.num_kv_heads, "entries of the vocabulary": shape.vocab_size}
    if shape.num_experts:
        counts["experts"] = shape.num_experts
    if shape.intermediate_size:
        counts["hidden columns of the feed-forward layers"] = shape.intermediate_size
    for what, count in counts.items():
        if count % fsdp.tp_size:
            yield f"fsdp.tp_size={fsdp.tp_size} does not divide the model's {count} {what}; {_way_out('fsdp.tp_size', count, fsdp.tp_size)}"
    if fsdp.ep_size > 1 and not shape.num_experts:
        yield f"fsdp.ep_size={fsdp.ep_size} does nothing with a model without experts ({shape.model_type}); set fsdp.ep_size=1"
    elif shape.num_experts % fsdp.ep_size:
        yield (
            f"fsdp.ep_size={fsdp.ep_size} does not divide the model's {shape.num_experts} experts; "
            f"{_way_out('fsdp.ep_size', shape.num_experts, fsdp.ep_size)}"
        )
    if shape.max_positions and config.data.max_len > shape.max_positions:
        yield (
            f"data.max_len={config.data.max_len} is longer than the model's {shape.max_positions} positions; "
            f"set data.max_len={shape.max_positions} or less"
        )
    if vllm.num_speculative_tokens and not shape.num_draft_layers:
        yield (
            f"vllm.num_speculative_tokens={vllm.num_speculative_tokens} needs a model with a multi-token-prediction head, the config.json "
            f"of this one ({shape.model_type}) names none; set it to 0"
        )
    if vllm.enable_expert_parallel and not shape.num_experts:
        yield f"vllm.enable_expert_parallel=true does nothing with a model without experts ({shape.model_type}); drop it"
    yield from _image_findings(config, shape)
    width = vllm.tensor_parallel_size
    if shape.num_heads % width:
        yield (
            f"vllm.tensor_parallel_size={width} does not divide the model's {shape.num_heads} attention heads; "
            f"{_way_out('vllm.tensor_parallel_size', shape.num_heads, width)}"
        )


def _image_findings(config: Config, shape: ModelShape) -> Iterator[str]:
    """What images do not allow, and what does nothing without them."""
    fsdp = config.fsdp
    if not shape.has_eyes:
        rooms = {"actor": ("freeze_vision",), "data": ("images_key", "max_images", "max_image_pixels")}
        for room, names in rooms.items():
            own = getattr(config, room)
            for name in names:
                if name in own.model_fields_set and getattr(own, name) != type(own).model_fields[name].default:
                    yield f"{room}.{name}={getattr(own, name)} does nothing with a model that takes no images ({shape.model_type}); drop it"
        return
    for name in ("tp_size", "cp_size", "ep_size"):
        if getattr(fsdp, name) > 1:
            yield f"fsdp.{name}={getattr(fsdp, name)} cannot spread a model that takes images; set it to 1 and raise fsdp.num_ranks"
    if config.actor.implementation == "automodel":
        yield "actor.implementation=automodel does not load models that take images here; set it to hf or auto"


def _way_out(name: str, count: int, size: int) -> str:
    """The nearest smaller size that divides a count."""
    return f"set {name}={next(n for n in range(size - 1, 0, -1) if count % n == 0)}"
