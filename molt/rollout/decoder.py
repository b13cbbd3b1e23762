"""The model of the embedded engine: forward passes over slots, weights in and out under checkpoint names, routes of experts.

Axes: B rows of one pass, Q new tokens of a row (shorter rows are padded on the left), V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from molt.data.processor import KEPT, ImageProcessor, PlacedImage
from molt.errors import RefitError, SettingError
from molt.rollout.engine import WeightSource
from molt.rollout.slots import SlotCache
from molt.rollout.vision import image_features, model_class
from molt.rollout.weights import check_names, checkpoint_names, digest_tensors, model_digest, named_weights, read_weights


class SlotDecoder:
    """A Hugging Face causal LM that decodes rows of different lengths together."""

    def __init__(self, model_path: str, *, dtype: torch.dtype, device: torch.device, max_len: int) -> None:
        from transformers import AutoConfig
        from transformers.utils import logging as hf_logging

        if not (Path(model_path) / "config.json").is_file():
            raise SettingError(f"actor.model_name_or_path={model_path}, no config.json there; give a folder with a Hugging Face model")
        whole = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        config = whole.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or {"full_attention"})
        if kinds != {"full_attention"}:
            raise SettingError(
                f"vllm.engine=embedded, model {model_path} has layers {sorted(kinds)}; it serves full attention only: use vllm"
            )
        hf_logging.disable_progress_bar()
        model = model_class(whole).from_pretrained(model_path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self.vocab_size = int(config.vocab_size)
        self.max_len = min(max_len, int(getattr(config, "max_position_embeddings", max_len)))
        self.cache = SlotCache(int(config.num_hidden_layers), max_length=self.max_len, device=device)
        self.processor = ImageProcessor.load(model_path)
        self._features: dict[str, torch.Tensor] = {}
        """Features of images that were seen last, by digest, made by the weights of now."""
        self._routers = [m for _, m in self.model.named_modules() if type(m).__name__.endswith("TopKRouter")]
        self._routes: list[torch.Tensor] = []
        for router in self._routers:
            router.register_forward_hook(self._keep_routes)
        self.forward([0], [[0]], [0])  # the first pass of a process is slow; no request should pay for it

    @property
    def num_moe_layers(self) -> int:
        """Layers whose routes are captured; 0 for a dense model."""
        return len(self._routers)

    @property
    def routes_shape(self) -> tuple[int, int]:
        """(L, K) of one token."""
        return len(self._routers), int(self._routers[0].top_k)  # type: ignore[arg-type]

    def _keep_routes(self, _module: torch.nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        self._routes.append(output[-1])

    @torch.inference_mode()
    def forward(
        self,
        slots_B: list[int],
        new_ids_B: Sequence[Sequence[int]],
        starts_B: list[int],
        images_B: Sequence[Sequence[PlacedImage]] = (),
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Run new ids of each slot from its start position: logits after the last one (B, V), and routes (B, Q, L, K) or None.

        images_B: images of each row by their place in its ids, those before its start and after its end too.
        """
        counts_B = [len(ids) for ids in new_ids_B]
        width, longest = max(counts_B), max(start + count for start, count in zip(starts_B, counts_B, strict=True))
        self.cache.reserve(max(slots_B) + 1, longest)
        ids_BQ = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in new_ids_B], device=self.device)
        ends_B1 = torch.tensor([[s + c] for s, c in zip(starts_B, counts_B, strict=True)], device=self.device)
        positions_BQ = ends_B1 - torch.arange(width, 0, -1, device=self.device)  # (B, Q)
        is_kept_BQ = positions_BQ >= torch.tensor(starts_B, device=self.device)[:, None]
        positions_BQ = positions_BQ.clamp(min=0)
        self.cache.aim(slots_B, positions_BQ, is_kept_BQ, longest)
        reach = torch.arange(longest, device=self.device)
        mask = (reach <= positions_BQ[:, None, :, None]) if width > 1 or len(slots_B) > 1 else None  # (B, 1, Q, longest)
        self._routes.clear()
        output = self.model(
            **self._inputs(ids_BQ, starts_B, counts_B, images_B),
            attention_mask=mask if mask is not None else torch.ones((1, 1, 1, longest), dtype=torch.bool, device=self.device),
            position_ids=positions_BQ,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        routes = None
        if self._routes:
            routes = torch.stack([route.view(len(slots_B), width, -1) for route in self._routes], dim=2).to("cpu", torch.int16).numpy()
        return output.logits[:, -1, :], routes

    def _inputs(
        self, ids_BQ: torch.Tensor, starts_B: list[int], counts_B: list[int], images_B: Sequence[Sequence[PlacedImage]]
    ) -> dict[str, torch.Tensor]:
        """The ids, or their embeddings where features of images stand among them."""
        width, embeds = ids_BQ.shape[1], None
        for row, images in enumerate(images_B):
            for image in images:
                place_F = torch.from_numpy(np.flatnonzero(image.expansion.is_feature)) + image.position - starts_B[row]
                is_here_F = (place_F >= 0) & (place_F < counts_B[row])
                if is_here_F.any():
                    embeds = self.model.get_input_embeddings()(ids_BQ) if embeds is None else embeds
                    features_FD = self._features_of(image)[is_here_F.to(self.device)]
                    embeds[row, (width - counts_B[row] + place_F[is_here_F]).to(self.device)] = features_FD.to(embeds.dtype)
        return {"input_ids": ids_BQ} if embeds is None else {"inputs_embeds": embeds}

    def _features_of(self, image: PlacedImage) -> torch.Tensor:
        """(F, D)."""
        digest = image.expansion.image.digest
        if digest not in self._features:
            tensors = {name: torch.from_numpy(tensor.copy()).to(self.device) for name, tensor in image.expansion.tensors().items()}
            self._features[digest] = image_features(self.model, tensors)
            while len(self._features) > KEPT:
                del self._features[next(iter(self._features))]
        return self._features[digest]

    def digests(self) -> dict[str, str]:
        """Digest of each tensor that it serves now."""
        return digest_tensors(named_weights(self.model))

    @torch.no_grad()
    def take(self, source: WeightSource) -> None:
        """Load new weights. Everything is read and compared first, so a bad file changes nothing."""
        new = dict(read_weights(source))
        own = named_weights(self.model)
        check_names(own, new, tied=getattr(self.model, "all_tied_weights_keys", None) or ())
        for name, tensor in own.items():
            if name in new and new[name].shape != tensor.shape:
                raise RefitError(f"{name}: shape {tuple(new[name].shape)} was sent, the engine has {tuple(tensor.shape)}")
        sent = {name: tensor.to(own[name].dtype) for name, tensor in new.items() if name in own}
        backup = {name: tensor.clone() for name, tensor in own.items()}
        self._copy(sent)
        self._features.clear()
        served = named_weights(self.model)
        wrong = next((name for name, tensor in sent.items() if not _same_bytes(served[name], tensor)), None)
        if wrong is not None:
            self._copy(backup)
            raise RefitError(f"{wrong} of version {source.policy_version}: what the engine holds after loading is not what was sent")

    def _copy(self, new: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors in under checkpoint names; fused parameters take each part at the elements that it came from."""
        parameters = {name: tensor for name, tensor in self.model.state_dict().items()}
        fused: dict[str, torch.Tensor] = {}
        for name, tensor in parameters.items():
            if name in new:
                tensor.copy_(new[name])
            elif name not in (getattr(self.model, "all_tied_weights_keys", None) or ()):
                fused[name] = tensor
        if fused:
            self._copy_fused(fused, new)

    def _copy_fused(self, fused: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> None:
        numbers: dict[str, torch.Tensor] = {}
        first = 0
        for name, tensor in fused.items():  # number every element, then see where the checkpoint's names find them
            numbers[name] = torch.arange(first, first + tensor.numel()).view(tensor.shape)
            first += tensor.numel()
        flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in fused.values()])
        for name, places in checkpoint_names(self.model, numbers).items():
            flat[places.reshape(-1)] = new[name].reshape(-1).to(flat.dtype)
        first = 0
        for tensor in fused.values():
            tensor.copy_(flat[first : first + tensor.numel()].view(tensor.shape))
            first += tensor.numel()

    def weights_digest(self) -> str:
        """One digest over all of them."""
        return model_digest(self.digests())


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.cpu(), right.cpu())
