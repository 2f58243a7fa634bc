"""Writes the regressors that ship with gpuprof, with hash and provenance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from gpuprof.estimators.cross_gpu.training import Trained

ROOT = Path(__file__).parent.parent / "gpuprof" / "datasets"
FOLDER = ROOT / "cross_gpu"
#: Least factors of intervals: the transformers that were measured are large, the networks few, and of products on
#: tensor cores no whole model was.
LEAST_SPREAD = {
    "products cores": 1.25,
    "products cores old": 2.0,
    "products tensor": 1.6,
    "convolutions cores": 2.0,
    "convolutions cores old": 2.5,
    "convolutions tensor": 2.5,
}


def write_regressors(trained: Trained, spread: Mapping[str, float]) -> str:
    """Write the regressors and what is known of their errors; return in words where and how large they are."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in trained.models.items():
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
    sources = [*sorted(ROOT.glob("neusight/*")), *sorted(ROOT.glob("aiconfigurator/*"))]
    provenance = {
        "command": "python -m bench.unseen_gpus --train --exports DIR --reference DIR",
        "library": f"lightgbm {version('lightgbm')}",
        "data": {path.relative_to(ROOT).as_posix(): hash_bytes(path.read_bytes()) for path in sources},
        "sha256": {name: hash_bytes(text.encode()) for name, text in trained.models.items()},
        "floor_s": dict(trained.floor_s),
        "spread": {
            name: round(max(LEAST_SPREAD.get(name, 1.0), spread.get(name, 1.0)), 4)
            for name in sorted({*LEAST_SPREAD, *spread})
        },
    }
    (FOLDER / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    return f"{FOLDER}: {len(trained.models)} regressors, {size / 1e6:.1f} MB"


def hash_bytes(content: bytes) -> str:
    """Return the SHA-256 of ``content``."""
    return hashlib.sha256(content).hexdigest()
