"""How much memory a model holds: liveness of tensors in the arena of the runtime."""
