"""The run on a machine with a GPU."""
