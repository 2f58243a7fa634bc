"""The page of devices is what the catalogue says."""

from __future__ import annotations

from bench.devices_table import PAGE, page
from gpuprof.domain.catalogue import devices


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m bench.devices_table"


def test_every_device_and_source_is_on_the_page() -> None:
    text = page()
    for gpu in devices().values():
        assert f"| `{gpu.name}` |" in text
        assert all(source in text for source in gpu.sources.values())
