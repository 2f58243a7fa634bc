"""Tries a call with an empty batch in a child process, because it crashes some ops of ONNX Runtime.

python -m gpuprof.merging.empty_call MODEL THREADS    (inputs by name come pickled on stdin)
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

#: Ops of ONNX that are known to end the process.
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})


def is_risky(nodes: Sequence[NodeProto]) -> bool:
    """Return whether some node may end the process: a recurrent one, one that is not ONNX's, one with a graph in it."""
    return any(
        node.op_type in _RECURRENT or node.domain or list_captured(node) or any(a.HasField("g") for a in node.attribute)
        for node in nodes
    )


def can_run(path: Path, fed: Mapping[str, Array], threads: int) -> bool:
    """Return whether a model can be run with these inputs, by doing it in another process."""
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
