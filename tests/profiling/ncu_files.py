"""Writes CSVs as ``ncu --csv`` prints them."""

from collections.abc import Mapping, Sequence

NOISE = (
    "==PROF== Connected to process 4711 (/usr/bin/python3.11)\n"
    '==PROF== Profiling "k0" - 0 (1/6): 0%....50%....100% - 9 passes\n'
    "the program's own words, with a comma\n"
    "==PROF== Disconnected from process 4711\n"
)
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
DURATION = "gpu__time_duration.sum"
READ = "dram__bytes_read.sum"
UNITS = {OCCUPANCY: "%", DURATION: "usecond", READ: "Mbyte", "launch__registers_per_thread": "register/thread"}

Kernel = tuple[str, tuple[int, int, int], tuple[int, int, int], Mapping[str, str]]


def raw_csv(kernels: Sequence[Kernel], units: Mapping[str, str] = UNITS) -> str:
    """A row for each kernel, behind one with the units."""
    metrics = list(dict.fromkeys(name for *_, values in kernels for name in values))
    head = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
    head += ["Block Size", "Grid Size", "Device", "CC", *metrics]
    rows = [head, [""] * 11 + [units.get(name, "") for name in metrics]]
    for index, (name, grid, block, values) in enumerate(kernels):
        fixed = [str(index), "4711", "python3.11", "127.0.0.1", name, "1", "7", str(block), str(grid), "0", "9.0"]
        rows.append([*fixed, *(values.get(metric, "") for metric in metrics)])
    return "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)


def long_csv(kernels: Sequence[Kernel], units: Mapping[str, str] = UNITS) -> str:
    """A row for each metric of each kernel."""
    head = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size"]
    rows = [[*head, "Grid Size", "Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value"]]
    for index, (name, grid, block, values) in enumerate(kernels):
        fixed = [str(index), "4711", "python3.11", "127.0.0.1", name, "1", "7", str(block), str(grid), "0", "9.0"]
        for metric, value in values.items():
            rows.append([*fixed, "Command line profiler metrics", metric, units.get(metric, ""), value])
    return "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)


def kernel(name: str, occupancy: str = "50.00", grid: int = 80, more: Mapping[str, str] | None = None) -> Kernel:
    return name, (grid, 1, 1), (256, 1, 1), {OCCUPANCY: occupancy, DURATION: "1,234.50", **(more or {})}
