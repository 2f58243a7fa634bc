"""Tries a call with an empty batch in a child process, because an empty batch crashes some ops of ONNX Runtime.

python -m gpuprof.merging.empty_call MODEL THREADS    (pickled dict of inputs by name on stdin)
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx import NodeProto

from gpuprof.graph.nodes import list_captured
from gpuprof.merging.source import Array
from gpuprof.runtime.module_command import module_command

#: ONNX ops known to crash the process on an empty batch.
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})


def is_risky(nodes: Sequence[NodeProto]) -> bool:
    """Return whether some node may crash the process: recurrent, outside ONNX's domain, or with a nested graph."""
    return any(
        node.op_type in _RECURRENT or node.domain or list_captured(node) or any(a.HasField("g") for a in node.attribute)
        for node in nodes
    )


def can_run(path: Path, fed: Mapping[str, Array], threads: int) -> bool:
    """Return whether a model runs with these inputs, by a trial in a child process."""
    words = module_command(__name__, str(path), str(threads))
    done = subprocess.run(words, input=pickle.dumps(dict(fed)), capture_output=True, check=False)
    return done.returncode == 0


def main() -> int:
    """Run the model once."""
    from gpuprof.runtime.session import open_session

    session = open_session(Path(sys.argv[1]), threads=int(sys.argv[2]))
    session.run(None, pickle.load(sys.stdin.buffer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
