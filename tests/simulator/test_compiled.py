"""Machine code that was kept is found by the source of all that is compiled together."""

from __future__ import annotations

from pathlib import Path

from gpuprof.simulator import compiled


def test_every_module_that_is_compiled_tells_kept_machine_code_from_that_of_another_version() -> None:
    folder = Path(compiled.__file__).parent
    using = {path.stem for path in folder.glob("*.py") if "\n@jit\n" in path.read_text(encoding="utf-8")}
    assert "kernel" in using
    assert using <= set(compiled._COMPILED)
