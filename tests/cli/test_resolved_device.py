from __future__ import annotations

from dataclasses import replace

import pytest

from gpuprof import local_device
from gpuprof.catalogue import device
from gpuprof.cli.devices import resolve_device
from gpuprof.errors import InputError


def test_a_gpu_of_this_machine_is_known_though_the_catalogue_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    board = replace(device("h100"), name="frobnicator-9000")
    monkeypatch.setattr(local_device, "local_gpus", lambda: (board,))
    assert resolve_device("frobnicator-9000", None).name == "frobnicator-9000"
    with pytest.raises(InputError, match="unknown device 'frobnicator-9001'"):
        resolve_device("frobnicator-9001", None)
