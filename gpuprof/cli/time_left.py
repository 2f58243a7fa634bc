"""The time left of a progress bar, shown after the first step: rich waits for two, and many bars have few."""

from __future__ import annotations

from rich.progress import Task, TimeRemainingColumn
from rich.text import Text


class TimeLeftColumn(TimeRemainingColumn):
    """Column with the time left at the mean pace of the completed steps.

    Reads two fields of its task: ``first``, the steps completed at its start, and ``paced_s``, its age in seconds at
    the last reported step. A task without them is shown by rich's rule.
    """

    def render(self, task: Task) -> Text:
        """Return the time left, dashes before the first step is done."""
        steps = task.completed - task.fields.get("first", task.completed)
        if task.finished or steps <= 0 or task.total is None:
            return super().render(task)
        left_s = task.fields["paced_s"] / steps * (task.total - task.completed)
        left_s = max(0.0, left_s - ((task.elapsed or 0.0) - task.fields["paced_s"]))
        if left_s < 0.5:  # the last step takes longer than the mean
            return Text("-:--:--", style="progress.remaining")
        minutes, seconds = divmod(round(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        return Text(f"{hours:d}:{minutes:02d}:{seconds:02d}", style="progress.remaining")
