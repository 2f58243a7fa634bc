"""Small published measurements: files as the authors of ParvaGPU and iGniter write them."""

import json
from pathlib import Path

#: Slices → (requests/s of one process alone, of each of two).
THROUGHPUT = {1: (100.0, 60.0), 2: (200.0, 110.0), 3: (290.0, 160.0), 4: (380.0, 210.0), 7: (640.0, 350.0)}


def write_parvagpu(reference: Path) -> Path:
    """Write two models that behave alike, and one scenario; return the folder of published data."""
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
    (folder / "SLO_req_rate.csv").write_text("700,120\n")
    (folder / "SLO_latency.csv").write_text("1000,1000\n")
    return reference


def write_igniter(reference: Path) -> Path:
    """Write a profile in the words of iGniter's tools, all models alike; return the folder of published data."""
    folder = reference / "igniter_v100"
    folder.mkdir(parents=True)
    figures: dict[str, object] = {
        "inputdata": 602112,
        "outputdata": 4000,
        "gpulatency": [[7.7, 2.9, 2.4], [91.7, 20.1, 11.5], [180.5, 38.4, 21.3]],
        "power": [[80.0, 120.0, 133.0], [85.0, 187.0, 288.0], [85.0, 186.0, 293.0]],
        "frequency": [[1530.0] * 3] * 3,
        "l2cache": 16.9,
        "l2caches": [2.9, 17.0, 33.0],
        "idletime_1": 0.07,
        "activetime_1": 20.3,
        "activetime_2": 21.3,
        "frequency_2": 1509.0,
        "kernel": 80,
    }
    hardware: dict[str, object] = {
        "idlepower": 53.5,
        "power": [118.0, 185.0, 259.0, 296.0, 295.0],
        "frequency": [1530.0, 1530.0, 1530.0, 1486.0, 1431.0],
        "idletime": [0.0014, 0.0017, 0.0068, 0.0119, 0.017],
        "maxGPUfrequency": 1530,
        "maxGPUpower": 300,
        "unit": 2.5,
        "bandwidth": 10000000,
    }
    tables = {"hardware": hardware, **dict.fromkeys(("alexnet", "resnet50", "vgg19", "ssd"), figures)}
    lines = [json.dumps({name: {key: value}}) for name, table in tables.items() for key, value in table.items()]
    (folder / "config.jsonl").write_text("\n".join(lines) + "\n")
    return reference
