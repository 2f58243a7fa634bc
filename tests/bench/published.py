"""Small published measurements: files as ParvaGPU's authors write them."""

from __future__ import annotations

from pathlib import Path

#: Slices → (requests/s of one process alone, of each of two).
THROUGHPUT = {1: (100.0, 60.0), 2: (200.0, 110.0), 3: (290.0, 160.0), 4: (380.0, 210.0), 7: (640.0, 350.0)}


def write_parvagpu(reference: Path, rates: tuple[float, float] = (700.0, 120.0)) -> Path:
    """Write two models that behave alike, and one scenario; return the directory that is given as --reference."""
    folder = reference / "parvagpu_a100"
    folder.mkdir(parents=True)
    header = "Mig instance,Batch size,Workload Number,Throughput,Latency"
    rows = [
        f"{size},{batch},{processes},{each},{batch / each:.3f}"
        for size, by_processes in THROUGHPUT.items()
        for processes, each in enumerate(by_processes, start=1)
        for batch in (1, 4)
    ]
    for model in ("a", "b"):
        (folder / f"{model}.csv").write_text("\n".join([header, *rows]) + "\n")
    (folder / "SLO_req_rate.csv").write_text(f"{rates[0]:g},{rates[1]:g}\n")
    (folder / "SLO_latency.csv").write_text("1000,1000\n")
    return reference
