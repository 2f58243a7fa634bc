"""USHER's GK-Estimator: ops, the kernels they call, and which of them overlap."""
