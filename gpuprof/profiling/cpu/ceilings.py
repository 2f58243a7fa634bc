"""Measures the peak rates of a CPU: FLOP/s of a matrix product, and bytes/s of passes over caches and memory.

All run in ONNX Runtime, in a child process held to the share, as models do: ceilings that a model can reach.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.kernel_db.schema import DeviceRow
from gpuprof.profiling.child.children import Child
from gpuprof.profiling.child.measurement import shared_group, slices_of
from gpuprof.profiling.child.task import Effort, PeakTask
from gpuprof.runtime.providers import ORT_CPU

#: Side of the square matrices: a product takes tens of milliseconds on a core, far longer than a call.
_MATRIX = 1024
_VECTOR_BYTES = 256 * 2**20  # well beyond any last-level cache
#: Sizes of working sets, read and written repeatedly: from a core's own cache to beyond all caches.
_SETS = tuple(2**power for power in range(18, 28))
#: Size of a nearly empty op, which measures the runtime's overhead per call.
_TINY_BYTES = 128
_TIME_S = 0.7
_SET_TIME_S = 0.1
_MIN_REPEATS = 5
_LOAD_S = 120.0
SOURCE = (
    f"measured: ONNX Runtime, float32 product of two {_MATRIX}x{_MATRIX} matrices; Relu over "
    f"{_VECTOR_BYTES >> 20} MiB, read and written bytes counted once each, and over "
    f"{_SETS[0] >> 10} KiB to {_SETS[-1] >> 20} MiB of them less what a call takes; best of repeats"
)


def measure_ceilings(device: Device, share: Share, run_id: str) -> DeviceRow:
    """Return the ceilings of ``share`` of this machine's CPU, measured in about four seconds.

    Raises `UnavailableError` when the share cannot be enforced here.
    """
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as directory:
        product = _Ceiling("MatMul", [[(_MATRIX, _MATRIX)] * 2])
        flops = 2.0 * _MATRIX**3 / _least_s(Path(directory), share, product)[0]
        traffic = 2.0 * _VECTOR_BYTES / _least_s(Path(directory), share, _Ceiling("Relu", [[(_VECTOR_BYTES // 4,)]]))[0]
        sets = _Ceiling("Relu", [[(size // 8,)] for size in (_TINY_BYTES, *_SETS)], _SET_TIME_S)
        call, *passes = _least_s(Path(directory), share, sets)
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
        reread_bytes_per_s=json.dumps(_rates(call, passes)),
        l2_bytes=device.l2_bytes,
        measured=True,
        source=SOURCE,
    )


@dataclass(frozen=True, slots=True)
class _Ceiling:
    """An op to time for inputs of each of several lists of shapes; the first is also its output's."""

    op_type: str
    cases: Sequence[Sequence[tuple[int, ...]]]
    time_s: float = _TIME_S


def _rates(call_s: float, passes_s: Sequence[float]) -> list[tuple[int, float]]:
    return [(size, size / max(taken - call_s, 0.1 * taken)) for size, taken in zip(_SETS, passes_s, strict=True)]


def _least_s(directory: Path, share: Share, ceiling: _Ceiling) -> list[float]:
    model = directory / f"{ceiling.op_type}.onnx"
    _write_model(model, ceiling.op_type, ceiling.cases[0])
    part = slices_of([share])[0]
    with shared_group("ceilings") as group:
        task = PeakTask(
            provider=ORT_CPU,
            threads=part.threads,
            part=part,
            group=group,
            model=model,
            cases=ceiling.cases,
            effort=Effort(time_s=ceiling.time_s, min_repeats=_MIN_REPEATS),
        )
        with Child(task, f"the ceiling of {ceiling.op_type}") as child:
            child.expect("ready", _LOAD_S)
            child.tell("go")
            least: list[int] = child.expect("done", _LOAD_S)["least_ns"]
    return [time_ns / 1e9 for time_ns in least]


def _write_model(path: Path, op_type: str, shapes: Sequence[tuple[int, ...]]) -> None:
    from onnx import TensorProto, helper, save

    free = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [None] * len(s)) for i, s in enumerate(shapes)]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shapes[0]))
    node = helper.make_node(op_type, [info.name for info in free], ["y"])
    graph = helper.make_graph([node], op_type, free, [output])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
