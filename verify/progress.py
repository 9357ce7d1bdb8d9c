"""Progress on standard error: a bar for people, and lines now and then in a log that asks for them."""

import sys
from contextlib import contextmanager
from time import monotonic

EVERY = 15.0  # seconds from one line of a log to the next


@contextmanager
def bar(title, *, log=False):
    """Yield ``update(done, total)``: a bar where standard error is a terminal; elsewhere lines if `log`, or nothing."""
    if not sys.stderr.isatty():
        yield _lines(title) if log else lambda done, total: None
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


def _lines(title):
    """An ``update`` that writes a line at once, and one whenever the last is `EVERY` seconds old."""
    start = last = monotonic()
    print(f"{title} ...", file=sys.stderr, flush=True)

    def update(done, total):
        nonlocal last
        if (now := monotonic()) - last >= EVERY:
            last = now
            print(f"{title}: {done} of {total}, {now - start:.0f} s", file=sys.stderr, flush=True)

    return update
