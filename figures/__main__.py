"""`python -m figures [topic ...]`: draw the figures of these topics, or of all, and print where they are.

`python -m figures readme [--check]` writes the README's table of steps, or says whether it is in step.
"""

import argparse
import sys
from pathlib import Path

from figures import TOPICS, draw
from figures.style import render

OUT = Path(__file__).with_name("out")


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message):
        print(f"figures: {message}", file=sys.stderr)
        sys.exit(2)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = _Parser(
        prog="python -m figures", description=__doc__.split(":")[1].split(".")[0]
    )
    parser.add_argument("topic", nargs="*", help=f"{', '.join(TOPICS)}; readme")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where to write (figures/out)")
    parser.add_argument("--format", choices=["svg", "png"], default="svg")
    parser.add_argument(
        "--check", action="store_true", help="with readme: write nothing, exit 1 if out of step"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Draw, print the paths, return the exit status."""
    args = parse(argv)
    unknown = [topic for topic in args.topic if topic not in (*TOPICS, "readme")]
    if unknown:
        print(
            f"figures: unknown topic {unknown[0]!r}; expected {', '.join(TOPICS)} or readme", file=sys.stderr
        )
        return 2
    if "readme" in args.topic:
        if len(args.topic) > 1 or args.out != OUT:
            print("figures: readme: expected no other topic and no --out, it writes the README", file=sys.stderr)
            return 2
        from figures.readme import update

        return update(check=args.check)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"figures: --out: expected a folder to write, {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    for topic in args.topic or TOPICS:
        for name, figure in draw(topic):
            path = args.out / f"{topic}_{name}.{args.format}"
            path.write_bytes(render(figure, args.format))
            print(path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
