"""The verbs of `python -m verify`, a module each: `add_arguments(parser)` and `run(args) -> exit status`."""
