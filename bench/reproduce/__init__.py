"""The papers' experiments that need no GPU: each a command that prints its table beside the paper's numbers."""
