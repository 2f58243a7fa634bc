"""Transport between client, router and workers: tensors, frames, shared memory, security."""
