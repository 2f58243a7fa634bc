"""gpuprof's own policy: integer programs over patterns, with a bound."""
