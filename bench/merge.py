"""Merges models that share weights and prints what that saves and costs on this machine's CPU.

    python -m bench.merge [--repeats N] [--batch N] [--threads N] [--models DIRECTORY] [--only WORDS]

Two copies of BERT-base fine-tuned with 10 of 12 layers frozen, two of ResNet-50 with 10 of 12 of its operators frozen,
and two pairs of unrelated models. For each: operators merged, weight bytes before and after, those of the frozen part,
memory resident with the sessions open, the latency of one call of the merged graph against the two models one after
the other and side by side on the same cores, of a call in which one model is absent against the other model alone, and
the largest difference of an output. Latencies are taken in turns and compared as medians of ratios.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import psutil
from onnx import numpy_helper

from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.machine.cpu import local_cpu
from gpuprof.merging.gain import device_rates
from gpuprof.merging.normalisation import normalise
from gpuprof.merging.operators import weighted_operators
from gpuprof.merging.pipeline import MergeOptions
from gpuprof.merging.proposal import MergeProposal, propose_merges
from gpuprof.merging.source import Array, read_source
from gpuprof.runtime.session import open_session
from gpuprof.zoo.architecture import find_architecture
from gpuprof.zoo.build import build

Feeds = dict[str, Array]
_FROZEN = 10 / 12


def main() -> int:
    """Print one block a pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="pairs whose names hold these words")
    parser.add_argument("--models", type=Path, help="keep the models here, and use those that are here")
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ONNX Runtime {onnxruntime.__version__}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.models or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for name, paths in pairs(directory).items():
            if options.only not in name:
                continue
            print(f"\n{name}", flush=True)
            measure(paths, directory, options)
    return 0


def pairs(directory: Path) -> dict[str, tuple[Path, Path]]:
    """Return the pairs of models, built where they are not there yet."""
    bert, resnet = zoo(directory, "bert_base", 0), zoo(directory, "resnet50", 0)
    return {
        "BERT-base, 10 of 12 layers frozen": (write_finetuned(bert, 1), write_finetuned(bert, 2)),
        "ResNet-50, 10 of 12 operators frozen": (write_finetuned(resnet, 1), write_finetuned(resnet, 2)),
        "unrelated: BERT-base and ResNet-50": (bert, resnet),
        "unrelated: two ResNet-50 trained apart": (resnet, zoo(directory, "resnet50", 7)),
    }


def zoo(directory: Path, name: str, seed: int) -> Path:
    """Return a network of the zoo."""
    path = directory / f"{name}-{seed}.onnx"
    if not path.exists():
        build(find_architecture(name), path, None, seed)
    return path


def write_finetuned(path: Path, seed: int) -> Path:
    """Return a copy in which every weight used only after the frozen operators is changed."""
    copy = path.with_stem(f"{path.stem}-tuned-{seed}")
    if copy.exists():
        return copy
    source = read_source(path, path.stem)
    normalise(source)
    operators = weighted_operators(source)
    first = operators[round(_FROZEN * len(operators))]
    model = onnx.load(str(path))
    outputs = [name for node in model.graph.node for name in node.output]
    cut = outputs.index(first.node.output[0])
    before = {name for node in model.graph.node if outputs.index(node.output[0]) < cut for name in node.input}
    random = np.random.default_rng(seed)
    for tensor in model.graph.initializer:
        if tensor.name not in before and tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) > 1:
            value = numpy_helper.to_array(tensor)
            changed = value + 0.1 * value.std() * random.standard_normal(value.shape)
            tensor.CopyFrom(numpy_helper.from_array(changed.astype(np.float32), tensor.name))
    onnx.save_model(model, str(copy))
    return copy


def measure(paths: tuple[Path, Path], directory: Path, options: argparse.Namespace) -> None:
    """Merge two models and print the figures."""
    start = time.perf_counter()
    batches = dict.fromkeys((path.stem for path in paths), options.batch)
    chosen = MergeOptions(threads=options.threads, batches=batches, rates=device_rates(local_cpu()))
    proposals = propose_merges(paths, chosen)
    line("time to propose the merge", f"{time.perf_counter() - start:.1f} s")
    if not proposals.merges:
        line("merged", "nothing")
        for name, reason in proposals.left_out:
            line(f"  {name}", reason)
        return
    proposal = proposals.merges[0]
    merged = directory / f"{paths[0].stem}-merged.onnx"
    report = proposal.write(merged)
    mib = 2**20
    sharing = (*report.merged, *report.shared)
    every = (report.merged, report.shared, report.operators)
    done, apart, total = (sum(len(row.operators) for row in rows) for rows in every)
    shared = sum(row.weight_bytes for row in sharing)
    kept = shared - sum(row.saved_bytes for row in sharing)
    line("operators merged", f"{done} of {total} run once, {apart} on shared weights only")
    line("other ops that run once", str(report.other_ops_merged))
    line("weights before, after", f"{report.weight_bytes_before / mib:.1f}, {report.weight_bytes_after / mib:.1f} MiB")
    line("weights of these operators before, after", f"{shared / mib:.1f}, {kept / mib:.1f} MiB")
    worst = report.proof.worst if report.proof else None
    line("largest relative difference of an output", f"{worst.relative:.2g}" if worst else "none")
    alone = report.proof.absent_rows if report.proof else {}
    line("rows computed for an absent model", ", ".join(map(str, alone.values())))
    line("predicted gain", f"{1e3 * report.gain_s:.2f} ms")
    held = [in_process(each, options.threads) / mib for each in ([merged], list(paths))]
    line("resident memory merged, apart", f"{held[0]:.0f}, {held[1]:.0f} MiB")
    print_latencies(paths, merged, proposal, options)


def in_process(paths: Sequence[Path], threads: int) -> int:
    """Return what resident memory grows by in a fresh process in which sessions on these models are opened."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(resident_bytes, (list(paths), threads))


def resident_bytes(paths: Sequence[Path], threads: int) -> int:
    """Return what resident memory grows by when sessions on these models are opened, what loading took returned."""
    trim = ctypes.CDLL(None).malloc_trim
    trim(0)
    before = psutil.Process().memory_info().rss
    sessions = [open_session(path, threads=threads) for path in paths]
    trim(0)
    return psutil.Process().memory_info().rss - before if sessions else 0


def print_latencies(paths: Sequence[Path], merged: Path, proposal: MergeProposal, options: argparse.Namespace) -> None:
    """Print the latency of the merged graph against the models run in turn and side by side."""
    feeds = [random_inputs(load_graph(path, options.batch), i) for i, path in enumerate(paths)]
    requests = {member.name: fed for member, fed in zip(proposal.merged.described.members, feeds, strict=True)}
    whole = proposal.merged.described.feeds(requests)
    described = proposal.merged.described
    present = described.members[0].name
    lonely, names = described.feeds({present: requests[present]}), described.output_names(present)
    one = open_session(merged, threads=options.threads)
    apart = [open_session(path, threads=options.threads) for path in paths]
    beside = [open_session(path, threads=max(1, options.threads // 2)) for path in paths]
    with ThreadPoolExecutor(2) as threads:
        ways: dict[str, Callable[[], object]] = {
            "merged": lambda: one.run(None, whole),
            "one after the other": lambda: [session.run(None, fed) for session, fed in zip(apart, feeds, strict=True)],
            "side by side": lambda: list(threads.map(lambda s, f: s.run(None, f), beside, feeds)),
            "merged, one absent": lambda: one.run(names, lonely),
            "one alone": lambda: apart[0].run(None, feeds[0]),
        }
        taken = in_turns(ways, options.repeats)
    line(f"latency merged, batch {options.batch} each", f"{1e3 * statistics.median(taken['merged']):.2f} ms")
    for name, other in (
        ("one after the other", "merged"),
        ("side by side", "merged"),
        ("one alone", "merged, one absent"),
    ):
        ratio = statistics.median(m / t for m, t in zip(taken[other], taken[name], strict=True))
        line(f"latency {name}", f"{1e3 * statistics.median(taken[name]):.2f} ms: {other} takes {ratio:.3f} of it")


def in_turns(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds that each way takes, measured in turns so that the machine's noise meets all alike."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 2):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if repeat >= 2:  # the first calls allocate
                taken[name].append(time.perf_counter() - start)
    return taken


def line(name: str, value: str) -> None:
    """Print one figure."""
    print(f"  {name:48s} {value}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
