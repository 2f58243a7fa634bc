"""Collection on a GPU, and from existing recordings."""
