"""The verbs without a terminal: typed arguments in, result objects out, progress by callback.

No module here prints or ends the process. `gpuprof.cli` parses the command line, calls one function of a module here
and renders its result; programs and notebooks call the same functions through ``gpuprof``. Of every function,
``progress`` is called with a `Progress` after each step of long work, and ``note`` at once with each remark.
"""
