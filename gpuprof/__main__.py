"""``python -m gpuprof``."""

from gpuprof.cli.main import console_script

console_script()
