"""Arguments and options that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.completion import complete_devices

MapFileArgument = Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map.")]
#: Of verbs that can do without a database.
OptionalDbOption = Annotated[Path | None, typer.Option(help="Kernel database.")]
DbOption = Annotated[Path, typer.Option(envvar="GPUPROF_DB", help="Kernel database.")]
DEFAULT_DB = Path("gpuprof-db")
DeviceFileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TOML file with GPUs that gpuprof does not know.")
]
PrecisionOption = Annotated[
    str | None, typer.Option(help="Precision of predictions: float32, tf32, float16, bfloat16, fp8 or int8.")
]
RuntimeOption = Annotated[
    str | None,
    typer.Option(
        help="Runtime that predictions assume: onnxruntime (default), tensorrt, pytorch-eager or pytorch-compiled; "
        "with :fused-attention where its optimizer makes one kernel of attention."
    ),
]
OtherEstimatorOption = Annotated[
    str | None, typer.Option(help="Estimator to use in place of the one that the map was planned with.")
]
StrictOption = Annotated[bool, typer.Option(help="Refuse estimates with unknown ops or wide intervals.")]
PolicySeedOption = Annotated[int, typer.Option(help="Seed of policies that draw random numbers.")]
AllowChangedOption = Annotated[
    bool, typer.Option("--allow-changed", help="Models may be other files than the map was planned with.")
]
CollectorOption = Annotated[str, typer.Option(help="Collector that measures; auto takes the first that works here.")]
KeepUnstableOption = Annotated[
    bool, typer.Option("--keep-unstable", help="Keep unstable rows as they are instead of measuring them again.")
]
InputDataOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[MODEL=]FILE", help="Input data: .npz, or JSON as perf_analyzer's; default: random. May be repeated."
    ),
]
ProfiledDeviceOption = Annotated[
    str | None,
    typer.Option(autocompletion=complete_devices, help="Device that was profiled; default: the one with most data."),
]
RegressorsOption = Annotated[str, typer.Option(help="Regressors to stack, separated by commas; lightgbm may be added.")]
ReplayedTraceOption = Annotated[Path | None, typer.Option(help="Trace to replay: a CSV file of time_s,model.")]
RateScaleOption = Annotated[float, typer.Option(help="Factor on all rates.", min=1e-6)]
ArrivalsOption = Annotated[
    str,
    typer.Option(help="Arrival process: constant, poisson, gamma:SCV, bursts:RATIO,BURST,CALM or diurnal:PEAK,PERIOD."),
]
RoutingOption = Annotated[str, typer.Option(help="Rule that picks the replica of a request: fastest or round-robin.")]
RayAddressOption = Annotated[
    str | None, typer.Option(envvar="RAY_ADDRESS", help="Address of the Ray cluster; default: this machine's.")
]
