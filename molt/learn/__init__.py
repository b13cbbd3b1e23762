"""The policy that learns: packed rows from the log, FSDP2, checkpoints and weights that flow back."""
