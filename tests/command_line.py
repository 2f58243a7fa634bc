"""The command line of gpuprof, called in the process of the test."""

import json
import shlex
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from gpuprof.cli.main import main


class Printed(NamedTuple):
    """Text of a command on standard output and standard error."""

    out: str
    err: str


@dataclass(frozen=True)
class CommandLine:
    """Runs commands: ``cli("place --gpus v100:2 -o", path, code=1).err``."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: object, code: int = 0) -> Printed:
        """Run the command of these words, of which texts are split as in a shell; it must exit with ``code``."""
        self.capsys.readouterr()
        assert main([part for word in words for part in shlex.split(str(word))]) == code
        return Printed(*self.capsys.readouterr())

    def json(self, *words: object, code: int = 0) -> Any:
        """Run the command with ``--json`` and return what it prints."""
        return json.loads(self(*words, "--json", code=code).out)
