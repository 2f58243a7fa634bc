"""What stands in for a GPU when `bench/gpu/run.sh` is rehearsed: everything runs but CUDA itself."""
