"""The child process that runs a model under its share, and its measurements."""
