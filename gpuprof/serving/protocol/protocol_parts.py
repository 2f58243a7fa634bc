"""What the protocols of one server share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpuprof.serving.protocol.loop_turns import LoopTurns
from gpuprof.serving.protocol.parse_pool import ParsePool
from gpuprof.serving.transport.inference import RefusedError

#: Told what is refused.
CountRefusal = Callable[[RefusedError], None]


@dataclass(frozen=True, slots=True)
class ProtocolParts:
    """The parts that one protocol uses of another."""

    pool: ParsePool = field(default_factory=ParsePool)  #: Reads and writes large texts.
    #: In which order requests are read where the router cannot keep up.
    turns: LoopTurns = field(default_factory=LoopTurns)
    count_refusal: CountRefusal = lambda refusal: None  #: Told what is refused.
