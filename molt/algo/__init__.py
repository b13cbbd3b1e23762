"""The algorithms as pure functions: trainer, replay, ablation and audit call the same ones."""
