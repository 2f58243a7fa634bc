"""The machine process: starts, watches and restarts the workers of a machine, and holds its GPUs' shares."""
