"""``python -m gpuprof``."""

from pkgutil import resolve_name

# By its name, as the installed script does it: nothing of gpuprof but the command line imports the command line.
resolve_name("gpuprof.cli.main:console_script")()
