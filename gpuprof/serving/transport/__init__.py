"""What travels between client, router and workers, and how: tensors, frames, shared memory, security."""
