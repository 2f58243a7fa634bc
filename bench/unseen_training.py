"""Writes the regressors that ship with gpuprof, with hash and provenance."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from bench.op_training import Trained
from gpuprof.estimators.cross_gpu.cross_gpu import ErrorScales

ROOT = Path(__file__).parent.parent / "gpuprof" / "datasets"
FOLDER = ROOT / "cross_gpu"


def write_regressors(trained: Trained, scales: ErrorScales) -> str:
    """Write the regressors and what is known of their errors; return in words where and how large they are."""
    FOLDER.mkdir(exist_ok=True)
    files = {f"{name}.onnx": content for name, content in trained.models.items()}
    files["intervals.json"] = (json.dumps(asdict(scales), indent=1, sort_keys=True) + "\n").encode()
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    sources = [*sorted(ROOT.glob("neusight/*")), *sorted(ROOT.glob("aiconfigurator/*"))]
    provenance = {
        "command": "python -m bench.unseen_gpus --train --exports DIR --reference DIR",
        "library": f"lightgbm {version('lightgbm')}",
        "data": {path.relative_to(ROOT).as_posix(): hash_bytes(path.read_bytes()) for path in sources},
        "sha256": {name: hash_bytes(content) for name, content in files.items()},
    }
    (FOLDER / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    return f"{FOLDER}: {len(trained.models)} regressors, {size / 1e6:.1f} MB"


def hash_bytes(content: bytes) -> str:
    """Return the SHA-256 of ``content``."""
    return hashlib.sha256(content).hexdigest()
