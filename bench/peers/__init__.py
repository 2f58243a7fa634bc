"""Other servers, each in an environment of its own, for `bench.serving` to measure beside ours."""
