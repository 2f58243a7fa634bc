"""Worker processes that keep a model under its share, and what they measure."""
