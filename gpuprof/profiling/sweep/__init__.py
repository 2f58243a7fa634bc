"""Planning and execution of sweeps over models, batches, shares and neighbours, on a machine or a cluster."""
