"""Measures the peak rates of a CPU: FLOP/s of a matrix product, and bytes/s of passes over caches and memory.

All run in ONNX Runtime, in a worker process held to the share, as models do: ceilings that a model can reach.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.kernel_db.schema import DeviceRow
from gpuprof.profiling.worker.job import DEFAULT_LIMITS, TimingLimits
from gpuprof.profiling.worker.measurement import share_worker
from gpuprof.profiling.worker.tasks import Effort, time_shapes

#: Side of the square matrices: a product takes tens of milliseconds on a core, far longer than a call.
_SIDE = 1024
#: Sizes of working sets, read and written repeatedly: from a core's own cache to beyond all caches.
_SETS = tuple(1 << power for power in range(18, 29))
SOURCE = (
    f"measured: ONNX Runtime, float32 product of two {_SIDE}x{_SIDE} matrices; Relu over {_SETS[0] >> 10} KiB to "
    f"{_SETS[-1] >> 20} MiB, read and written bytes counted once each, less what a call takes; best of repeats"
)


def measure_ceilings(device: Device, share: Share, run_id: str, limits: TimingLimits = DEFAULT_LIMITS) -> DeviceRow:
    """Return the ceilings of ``share`` of this machine's CPU, measured in about the ``min_time_s`` of the limits.

    Raises `UnavailableError` when the share cannot be enforced here.
    """
    shapes = [[(size // 8,)] for size in _SETS]
    effort = Effort(time_s=limits.min_time_s / (len(shapes) + 2), min_repeats=limits.min_repeats)
    with tempfile.TemporaryDirectory(prefix="gpuprof-") as name, share_worker(share, "peak rates") as worker:
        product, passes = Path(name, "product.onnx"), Path(name, "passes.onnx")
        _write_model(product, "MatMul", [(_SIDE, _SIDE)] * 2)
        _write_model(passes, "Relu", shapes[0])
        (product_s,) = worker.call(time_shapes, product, [[(_SIDE, _SIDE)] * 2], effort)
        call_s, *passes_s = worker.call(time_shapes, passes, [[(1,)], *shapes], effort)
    rates = [(size, size / max(pass_s - call_s, 0.1 * pass_s)) for size, pass_s in zip(_SETS, passes_s, strict=True)]
    return DeviceRow(
        run_id=run_id,
        device=device.name,
        kind=device.kind,
        compute_units=device.compute_units,
        sm_share_pct=share.sm_pct,
        clock_mhz=device.clock_mhz,
        float32_flops_per_s=2.0 * _SIDE**3 / product_s,
        dram_bytes=device.dram_bytes,
        dram_bytes_per_s=rates[-1][1],
        reread_bytes_per_s=json.dumps(rates),
        l2_bytes=device.l2_bytes,
        measured=True,
        source=SOURCE,
    )


def _write_model(path: Path, op_type: str, shapes: Sequence[tuple[int, ...]]) -> None:
    from onnx import TensorProto, helper, save

    free = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [None] * len(s)) for i, s in enumerate(shapes)]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shapes[0]))
    node = helper.make_node(op_type, [info.name for info in free], ["y"])
    graph = helper.make_graph([node], op_type, free, [output])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
