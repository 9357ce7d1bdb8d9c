"""Command line: `python -m verify [verb] [options]`; see `commands/` for the verbs. Exit 0 pass, 1 fail, 2 misuse."""

import argparse
import pkgutil
import sys
from importlib import import_module

from verify import commands
from verify.misuse import Misuse, suggest

DEFAULT_VERB = "run"


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message):
        raise Misuse(message)


def verbs() -> list[str]:
    """The modules in `commands`."""
    return [info.name for info in pkgutil.iter_modules(commands.__path__)]


def main(argv=None) -> int:
    """Dispatch to a verb and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv[:1] in (["-h"], ["--help"]):
            return _help()
        if not argv or argv[0].startswith("-"):
            argv.insert(0, DEFAULT_VERB)
        verb = argv.pop(0)
        if verb not in verbs():
            raise Misuse(f"verb: there is no {verb!r}; {suggest(verb, verbs())}")
        module = import_module(f"verify.commands.{verb}")
        # No abbreviations: `--case` must not quietly mean `--cases` today and something else tomorrow.
        parser = _Parser(prog=f"python -m verify {verb}", description=module.__doc__, allow_abbrev=False)
        module.add_arguments(parser)
        return module.run(parser.parse_args(argv))
    except Misuse as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:  # a full disk, a file that went away: said as plainly as misuse
        print(f"verify: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("verify: interrupted", file=sys.stderr)
        return 130


def _help() -> int:
    print(__doc__ + "\n")
    for verb in verbs():
        about = (import_module(f"verify.commands.{verb}").__doc__ or "").splitlines()[0]
        print(f"  {verb:12} {about}")
    print("\n`python -m verify VERB --help` has the options of a verb; without a verb, run.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
