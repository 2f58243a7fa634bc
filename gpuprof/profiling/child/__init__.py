"""The child process that runs a model under its share, and what is measured of it."""
