"""A worker: the process of a replica that forms batches from requests and runs its model."""
