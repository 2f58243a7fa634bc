"""A worker: one process of a replica, which batches and runs its model."""
