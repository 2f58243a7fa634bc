"""Measures what a CPU can do at best: FLOP/s of a matrix product and bytes/s of a pass over memory.

Both run in ONNX Runtime, in a child process held to the share, as models do: ceilings that a model can reach.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from gpuprof.device import Device
from gpuprof.kernel_db.schema import DeviceRow
from gpuprof.profiling.child.children import Child
from gpuprof.profiling.child.measurement import shared_group, slices_of
from gpuprof.runtimes import ORT_CPU
from gpuprof.share import Share

_MATRIX = 1024
_VECTOR_BYTES = 256 * 2**20  # well beyond any last-level cache
_TIME_S = 0.7
_MIN_REPEATS = 5
_LOAD_S = 120.0
SOURCE = (
    f"measured: ONNX Runtime, float32 product of two {_MATRIX}x{_MATRIX} matrices; Relu over "
    f"{_VECTOR_BYTES >> 20} MiB, read and written bytes counted once each; best of repeats"
)


def measure_ceilings(device: Device, share: Share, run_id: str) -> DeviceRow:
    """Return what ``share`` of this machine's CPU reaches, measured in about two seconds.

    Raises
    ------
    UnavailableError
        When the share cannot be enforced here.
    """
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as directory:
        flops = 2.0 * _MATRIX**3 / _least_s(Path(directory), share, "MatMul", [(_MATRIX, _MATRIX)] * 2)
        elements = _VECTOR_BYTES // 4
        traffic = 2.0 * _VECTOR_BYTES / _least_s(Path(directory), share, "Relu", [(elements,)])
    return DeviceRow(
        run_id=run_id,
        device=device.name,
        kind=device.kind,
        compute_units=device.compute_units,
        sm_share_pct=share.sm_pct,
        clock_mhz=device.clock_mhz,
        float32_flops_per_s=flops,
        dram_bytes=device.dram_bytes,
        dram_bytes_per_s=traffic,
        l2_bytes=device.l2_bytes,
        measured=True,
        source=SOURCE,
    )


def _least_s(directory: Path, share: Share, op_type: str, shapes: list[tuple[int, ...]]) -> float:
    model = directory / f"{op_type}.onnx"
    _write_model(model, op_type, shapes)
    part = slices_of([share])[0]
    with shared_group("ceilings") as group:
        task = {
            "kind": "peak",
            "model": str(model),
            "input_shapes": {f"x{i}": shape for i, shape in enumerate(shapes)},
            "output_shape": shapes[0],
            "threads": part.threads,
            "provider": ORT_CPU,
            "slice": asdict(part),
            "group": group,
            "time_s": _TIME_S,
            "min_repeats": _MIN_REPEATS,
        }
        with Child(task, f"the ceiling of {op_type}") as child:
            child.expect("ready", _LOAD_S)
            child.tell("go")
            latencies: list[int] = child.expect("done", _LOAD_S)["latencies_ns"]
    return min(latencies) / 1e9


def _write_model(path: Path, op_type: str, shapes: list[tuple[int, ...]]) -> None:
    from onnx import TensorProto, helper, save

    inputs = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, shape) for i, shape in enumerate(shapes)]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, shapes[0])
    node = helper.make_node(op_type, [info.name for info in inputs], ["y"])
    graph = helper.make_graph([node], op_type, inputs, [output])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
