"""What to measure: models, batches, shares, neighbours; on one machine or a cluster."""
