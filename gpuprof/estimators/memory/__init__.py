"""Memory of a model: liveness of tensors in the arena of the runtime."""
