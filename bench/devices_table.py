"""Writes the device catalogue as a page for people.

    python -m bench.devices_table [-o docs/devices.md]

A test compares the page with what this command writes, so that the two cannot drift apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpuprof.domain.catalogue import devices
from gpuprof.domain.device import Device

PAGE = Path(__file__).parent.parent / "docs" / "devices.md"
TYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "int8", "float8", "float4")
INTRODUCTION = """\
# Devices

<!-- Written by `python -m bench.devices_table`; edit gpuprof/datasets/devices.toml instead. -->

GPUs that gpuprof plans for without having one, from `gpuprof/datasets/devices.toml`. Name them in `--gpus` and
`--device`. A GPU or CPU of this machine is described by its driver or system, and measurements take precedence over
all values below.

Rates are dense peaks in TFLOP/s (int8: TOP/s), on tensor cores where the type has them; a dash means that no rate is
published. Memory is in GiB, bandwidth in GB/s, prices in US dollars for one GPU and hour, as the source says.
"""


def page() -> str:
    """Return the page as Markdown."""
    gpus = list(devices().values())
    with_mig = [gpu for gpu in gpus if gpu.mig_profiles]
    return "\n".join(
        [
            INTRODUCTION,
            "## Compute and memory\n",
            _table(
                ("name", "GPU", "CC", "SMs", "MHz", *TYPES, "GiB", "memory", "GB/s", "L2 MiB", "W", "$/h", "as of"),
                map(_row, gpus),
            ),
            "## What one SM holds\n",
            _table(("name", "threads", "warps", "blocks", "registers", "shared KiB", "of a block"), map(_limits, gpus)),
            "## MIG profiles\n",
            "Start slots are the memory slices at which an instance may begin.\n",
            _table(
                ("name", "profile", "SMs", "GiB", "memory slices", "compute slices", "start slots", "at most"),
                (row for gpu in with_mig for row in _profiles(gpu)),
            ),
            "## Sources\n",
            *(_sources(gpu) for gpu in gpus),
        ]
    )


def main() -> int:
    """Write the page and say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    output: Path = parser.parse_args().output
    output.write_text(page(), encoding="utf-8")
    print(f"{output}: {len(devices())} devices")
    return 0


def _row(gpu: Device) -> Sequence[str]:
    rates = (_number(gpu.flops_per_s[dtype] / 1e12) if dtype in gpu.flops_per_s else "–" for dtype in TYPES)
    return (
        f"`{gpu.name}`",
        gpu.sources["name"],
        gpu.compute_capability or "–",
        str(gpu.compute_units),
        _number(gpu.clock_mhz),
        *rates,
        _number(gpu.dram_bytes / 2**30),
        (gpu.dram_type or "–").upper(),
        _number(gpu.dram_bytes_per_s / 1e9),
        _number(gpu.l2_bytes / 2**20),
        "–" if gpu.max_power_w is None else _number(gpu.max_power_w),
        "–" if gpu.price_per_hour is None else f"{gpu.price_per_hour:.2f}",
        gpu.price_date or "–",
    )


def _limits(gpu: Device) -> Sequence[str]:
    if gpu.sm is None:
        return (f"`{gpu.name}`", *("–",) * 6)
    kibibytes = (gpu.sm.shared_memory_bytes >> 10, gpu.sm.max_shared_memory_per_block_bytes >> 10)
    numbers = (gpu.sm.threads, gpu.sm.warps, gpu.sm.blocks, gpu.sm.registers, *kibibytes)
    return (f"`{gpu.name}`", *(str(number) for number in numbers))


def _profiles(gpu: Device) -> Iterable[Sequence[str]]:
    for profile in gpu.mig_profiles:
        numbers = (profile.memory_slices, profile.compute_slices)
        starts = ", ".join(str(start) for start in profile.start_slots)
        memory = f"{profile.memory_bytes / 2**30:.2f}"
        yield (
            f"`{gpu.name}`",
            profile.name,
            str(profile.sms),
            memory,
            *map(str, numbers),
            starts,
            str(profile.max_count),
        )


def _sources(gpu: Device) -> str:
    lines = [f"**{gpu.name}**\n", *(f"- {group}: {text}" for group, text in gpu.sources.items() if group != "name")]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ("---", *("---:",) * (len(head) - 1))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)) + "\n"


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
