"""Run the notebooks: `python notebooks/build.py [STEM ...]` executes NN_*.py and writes NN_*.ipynb beside it.

The .py with percent cells is what is edited; the .ipynb holds the same cells with their outputs.
"""

import argparse
import re
import sys
from pathlib import Path
from time import perf_counter

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SECONDS = 300  # more than this in one cell is a hang


def sources() -> list[Path]:
    """Every notebook source, in reading order."""
    return sorted(path for path in HERE.glob("*.py") if re.match(r"\d\d_", path.name))


def read(source: Path) -> nbformat.NotebookNode:
    """Return the notebook of a percent-format file, without outputs and with the same ids on every run."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for index, cell in enumerate(notebook.cells):
        cell.id = f"{source.stem}-{index}"
        cell.metadata = nbformat.from_dict({})
    return notebook


def execute(source: Path) -> nbformat.NotebookNode:
    """Run a notebook from top to bottom in a fresh kernel.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        A cell raised: an assertion, or a call that no longer fits.
    """
    notebook = read(source)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # or the kernel warns of its own transport in our output
        timeout=SECONDS,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": HERE}},
    )
    client.execute()
    # What the kernel reports of itself differs between machines.
    notebook.metadata["language_info"] = nbformat.from_dict({"name": "python"})
    nbformat.validate(notebook)
    return notebook


def main(argv: list[str] | None = None) -> int:
    """Execute the named notebooks, or all, and write each .ipynb."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stem", nargs="*", help="such as 02_attention; all if left out")
    wanted = parser.parse_args(argv).stem
    known = {path.stem: path for path in sources()}
    if unknown := [stem for stem in wanted if stem not in known]:
        print(f"notebooks: there is no {unknown[0]!r}; expected {', '.join(known)}", file=sys.stderr)
        return 2
    for stem in wanted or known:
        start = perf_counter()
        target = known[stem].with_suffix(".ipynb")
        nbformat.write(execute(known[stem]), target)
        print(f"{target}  {target.stat().st_size / 1024:.0f} KiB  {perf_counter() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
