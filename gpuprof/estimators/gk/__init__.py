"""USHER's GK-Estimator: ops, the kernels they launch, and the sets of concurrent kernels."""
