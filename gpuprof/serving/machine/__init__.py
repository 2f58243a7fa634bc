"""The machine process: starts, watches and restarts the workers of one machine, and holds its GPUs' shares."""
