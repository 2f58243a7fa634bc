"""What each verb does, without a terminal: typed arguments in, result objects out, progress by callback.

Nothing here prints or ends the process. `gpuprof.cli` parses what a user typed, calls one function of a module here and
renders what it returns; programs and notebooks call the same functions through ``gpuprof``.
"""
