"""NeMo AutoModel behind the model seam: its own layers and kernels, our packing, scorer, sharding and routing replay.

sizes                     who shards
tp = ep = cp = 1          molt.learn.policy.shard: fully_shard with the bf16 policy, at one rank too
ep > 1                    AutoModel's DistributedSetup (experts over ranks, the rest by FSDP2 with the same policy)
cp > 1                    both as above: slices are cut by molt.learn.context and AutoModel sees ranks with other tokens
tp > 1                    refused: its plans leave experts whole and scale their gradients afterwards; take the Hugging Face class
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from molt import environ
from molt.config import ActorSettings, FsdpSettings
from molt.errors import SettingError
from molt.learn import attention
from molt.learn.context import Slice

ATTENTION = {"sdpa": "sdpa", "te": "te", "flex": "sdpa"}
"""fsdp.attn_implementation to AutoModel's backend; sdpa is replaced by a row-wise attention of ours."""
ROWS: dict[str, tuple[str, Callable[..., tuple[torch.Tensor, None]]]] = {
    "sdpa": (attention.NAME, attention.rows_attention),
    "flex": (attention.FLEX, attention.flex_rows_attention),
}
"""fsdp.attn_implementation to that attention."""


def is_installed() -> bool:
    """Whether NeMo AutoModel can be imported."""
    return find_spec("nemo_automodel") is not None


def load_automodel(path: str, actor: ActorSettings, fsdp: FsdpSettings) -> tuple[Any, str]:
    """The language model in float32 master weights, and the name of its attention. Raises SettingError for what it cannot do."""
    keep_one_cudnn()
    check(fsdp)
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.models.common.utils import BackendConfig

    attention.register()
    backend = BackendConfig(
        attn=ATTENTION[fsdp.attn_implementation],
        linear="torch",
        rms_norm="torch_fp32" if torch.cuda.is_available() else "torch",  # the first is compiled, which helps on a GPU only
        rope_fusion=False,
        dispatcher="torch",
        gate_precision=torch.float32 if actor.moe_router_dtype == "float32" else None,
    )
    options: dict[str, Any] = {"backend": backend, "use_liger_kernel": False, "torch_dtype": torch.float32}
    if fsdp.ep_size > 1:
        options["distributed_setup"] = _setup(actor, fsdp)
    # The attention of plain sdpa knows no rows; it is replaced below, so AutoModel only needs a name that it accepts.
    lm = NeMoAutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", **options)
    lm = lm.to(torch.float32) if fsdp.ep_size == 1 else lm
    for module in lm.modules():
        if getattr(module, "aux_loss_coeff", 0.0):
            module.aux_loss_coeff = 0.0  # a balancing loss would be a gradient that no recorded loss shows
    if fsdp.attn_implementation in ROWS:
        return lm, _use_rows(lm, *ROWS[fsdp.attn_implementation])
    return lm, fsdp.attn_implementation


def check(fsdp: FsdpSettings) -> None:
    """SettingError for sizes, attention or an installation that this seam does not have."""
    if not is_installed():
        raise SettingError("actor.implementation=automodel, the package nemo-automodel is not installed; install molt-log[gpu] or set hf")
    if fsdp.tp_size > 1:
        raise SettingError(
            f"fsdp.tp_size={fsdp.tp_size} with actor.implementation=automodel, tensor parallelism is that of the Hugging Face class; "
            "set actor.implementation=hf, or fsdp.tp_size=1"
        )
    if fsdp.attn_implementation not in ATTENTION:
        raise SettingError(
            f"fsdp.attn_implementation={fsdp.attn_implementation}, AutoModel has {', '.join(ATTENTION)} for packed rows; "
            "set one of them, or actor.implementation=hf"
        )
    if fsdp.attn_implementation == "te" and (why := _why_no_transformer_engine()) is not None:
        raise SettingError(
            f"fsdp.attn_implementation=te, Transformer Engine cannot be used: {why}; install it with its torch extension, "
            "or set fsdp.attn_implementation=sdpa"
        )


def keep_one_cudnn() -> None:
    """Load all parts of torch's cuDNN before Transformer Engine asks for them by name; CUDNN_HOME stays where a user set it.

    It would get the system's where torch has not loaded its own yet, and then parts of two versions call each other.
    """
    parts = cudnn_parts() if find_spec("transformer_engine") is not None else []
    for part in parts:
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
        environ.set_default("CUDNN_HOME", str(part.parent))


def cudnn_parts(maps: Path = Path("/proc/self/maps")) -> list[Path]:
    """The libraries of the cuDNN that this process has begun to load, the one that the others call first; none without one."""
    mapped = re.search(r"(/\S*)/libcudnn\.so", maps.read_text()) if maps.exists() else None
    found = Path(mapped[1]).glob("libcudnn*.so.*") if mapped else []
    return sorted(found, key=lambda file: ("_graph" not in file.name, file.name))


def check_te_memory(row_lengths: Sequence[int], config: Any) -> None:
    """Refuse packed rows whose deterministic backward pass through Transformer Engine does not fit the card."""
    if not (torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled() and torch.cuda.is_available()):
        return
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if (needed := te_backward_bytes(row_lengths, config)) > free:
        raise SettingError(
            f"fsdp.attn_implementation=te with train.deterministic=true: the backward pass of {len(row_lengths)} packed rows, "
            f"{sum(row_lengths)} tokens, takes {needed / 2**30:.1f} GiB in Transformer Engine, {free / 2**30:.1f} GiB are free; "
            "lower train.micro_batch_tokens (the need grows with its cube), take fsdp.attn_implementation=sdpa or set "
            "train.deterministic=false"
        )


def te_backward_bytes(row_lengths: Sequence[int], config: Any) -> int:
    """Bytes of cuDNN's deterministic backward pass over packed rows, as Transformer Engine asks for it: one float32 gradient of all
    queries for each row and each 128 keys, rows and tokens counted in powers of two (seen: 576 GiB for 128 rows of 9 heads of 64 in
    14,080 tokens)."""
    rows, tokens = (1 << (count - 1).bit_length() for count in (len(row_lengths), sum(row_lengths)))
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 4 * heads * head_dim * rows * tokens * max(1, tokens // 128)


def _why_no_transformer_engine() -> str | None:
    """None when it can be imported. Without its core, or a library that it loads, that raises other errors than ImportError."""
    if find_spec("transformer_engine") is None:
        return "it is not installed"
    try:
        import transformer_engine.pytorch  # noqa: F401 - tried for its torch extension
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _setup(actor: ActorSettings, fsdp: FsdpSettings) -> Any:
    """AutoModel's own spread over ranks, with the precision that molt.learn.policy.shard applies."""
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from torch.distributed.fsdp import MixedPrecisionPolicy

    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if actor.dtype == "bfloat16" else torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    return DistributedSetup.build(
        FSDP2Config(mp_policy=precision, defer_fsdp_grad_sync=False),
        parallelism_sizes=ParallelismSizes(ep_size=fsdp.ep_size, dp_replicate_size=fsdp.replicas if fsdp.replicas > 1 else None),
        activation_checkpointing=False,  # molt.learn.model does it for every model, and keeps the names of weights as they are
    )


def _use_rows(lm: Any, name: str, attend: Callable[..., tuple[torch.Tensor, None]]) -> str:
    """Put a row-wise attention into every layer: by name where layers ask transformers, by function where they hold their own."""
    lm.config._attn_implementation = name
    bounds = RowBounds()
    for module in lm.modules():
        if hasattr(module, "attn_func") and hasattr(module, "backend"):
            module.attn_func = RowsFunction(bounds, attend, scaling=_scaling(module))
    lm.row_bounds = bounds
    return name


def _scaling(module: Any) -> float:
    """What a layer multiplies its scores by."""
    given = getattr(module, "softmax_scale", None)
    return float(module.head_dim) ** -0.5 if given is None else float(given)


class RowBounds:
    """Row lengths of the forward pass that is running; it stays for the recomputation in the backward pass."""

    def __init__(self) -> None:
        self.row_lengths: tuple[int, ...] | None = None
        self.slice_of: Slice | None = None


class RowsFunction:
    """The attention function of a layer of AutoModel: q, k, v of shape (1, H, L, D) in and out."""

    def __init__(self, bounds: RowBounds, attend: Callable[..., tuple[torch.Tensor, None]], *, scaling: float) -> None:
        self.bounds = bounds
        self.attend = attend
        self.scaling = scaling

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        """Causal attention inside each row."""
        bounds = self.bounds
        known = {"row_lengths": bounds.row_lengths, "slice_of": bounds.slice_of, "scaling": self.scaling}
        output, _ = self.attend(nn.Identity(), q, k, v, None, **options | known)
        return output.transpose(1, 2)
