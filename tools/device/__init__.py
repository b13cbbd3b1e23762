"""Programs for a machine with GPUs: each measures or proves one thing and leaves JSON; --rehearse runs the same on a CPU."""
