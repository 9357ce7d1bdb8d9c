"""A progress bar on standard error, for people: pipes and logs get none."""

import sys
from contextlib import contextmanager


@contextmanager
def bar(title):
    """Yield ``update(done, total)``: a bar where standard error is a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
