"""Results of the verbs: rows for frames and notebooks, and notes for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gpuprof.domain.number_format import NumberFormat

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a long task.

    Attributes
    ----------
    step : str
        The step just done, in words.
    done, total : int
        Steps done, and their total; ``total`` is 0 where unknown.
    """

    step: str
    done: int = 0
    total: int = 0


#: Called after each step of long work, in the thread that does the work; by ``load`` in a thread of its own.
ProgressCallback = Callable[[Progress], None]
#: Callback for a remark, called immediately; a verb's result has all remarks in its ``notes``.
NoteCallback = Callable[[str], None]


def say_nothing(event: object) -> None:
    """Ignore progress, or a note: the default callback."""


class NoteList:
    """Collects the notes of a result, and passes each note on immediately.

    In a ``with`` statement, an error that ends the work carries the notes (`BaseException.add_note`). ``note``: called
    with each note.
    """

    def __init__(self, note: NoteCallback = say_nothing) -> None:
        self._note = note
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            for note in self._notes:
                error.add_note(note)

    def add(self, *notes: str) -> None:
        """Keep each note for the result and pass it to the caller's ``note``."""
        for note in notes:
            self._notes.append(note)
            self._note(note)

    def all(self) -> tuple[str, ...]:
        """Return the notes so far, in their order."""
        return tuple(self._notes)


@dataclass(frozen=True)
class Result(ABC):
    """The result of a verb.

    Attributes
    ----------
    notes : tuple of str
        Remarks on the result, each a sentence: assumptions, omissions, next steps.
    """

    notes: tuple[str, ...] = ()

    @abstractmethod
    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return the result as records with units in their keys, as ``--json`` and ``--csv`` print them."""

    def to_frame(self) -> pd.DataFrame:
        """Return `rows` as a pandas frame, a record a row."""
        import pandas as pd

        return pd.DataFrame.from_records([dict(row) for row in self.rows()])

    def _repr_html_(self) -> str:
        """Return the frame and the notes as HTML for notebooks: four digits, without empty columns."""
        from html import escape

        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        frame = self.to_frame().dropna(axis="columns", how="all").astype(object)
        if frame.empty:
            return f"<p>no rows</p>{notes}"
        show = NumberFormat(4)
        frame = frame.where(frame.notna(), "–").map(lambda value: show(value) if isinstance(value, float) else value)
        return f"{frame.to_html(index=False)}{notes}"
