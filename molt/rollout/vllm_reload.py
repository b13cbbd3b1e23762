"""What a weight update that broke off leaves in a vLLM worker, and how it is taken away.

vLLM loads layer by layer: a layer's parameters are put aside, tensors wait until all of the layer have come, then they are copied into
the parameters that were put aside. After an update that broke off some layers still wait, with tensors of the broken update: a later one
would be counted on top of those. And a worker that broke off at its end (0.26 to 0.32) believes that the update goes on.
"""

from __future__ import annotations

from typing import Any


def drop_update(worker: Any) -> None:
    """Let every layer that still waits have the parameters that it had before, and the worker take another update."""
    worker._weight_update_active = False
    reset_target = getattr(getattr(worker, "weight_transfer_engine", None), "reset_weight_update_target", None)
    if reset_target is not None:
        reset_target()
    _restore_layers(worker.model_runner.get_model())


def _restore_layers(model: Any) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        if info.kernel_tensors is not None or info.load_numel_total is not None:
            info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    layerwise.LOADING_LAYERS.clear()
