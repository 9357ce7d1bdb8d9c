"""What several verbs ask for alike: names of kernels, cases and types, and files to write."""

import argparse
from pathlib import Path

from verify import executors
from verify.cases import DEFAULT
from verify.dtypes import DTYPES
from verify.misuse import Misuse, pick
from verify.registry import ALL, KERNELS


def add_kernels(parser):
    """--kernels"""
    parser.add_argument("--kernels", metavar="NAMES", help="comma-separated; all that fit if left out")


def add_dtype(parser):
    """--dtype"""
    parser.add_argument("--dtype", metavar="NAMES", help="comma-separated storage types; fp32,fp16,bf16 if left out")


def kernels(args, default=None) -> list[str]:
    """The chosen kernels; the ladder, or `default`, if none are named.

    Raises
    ------
    Misuse
    """
    if args.kernels is None:
        return list(KERNELS if default is None else default)
    return pick("--kernels", args.kernels, ALL, what="kernel")


def cases(args) -> list[str]:
    """The chosen default cases.

    Raises
    ------
    Misuse
    """
    return pick("--cases", args.cases, DEFAULT, what="case", listed="--cases list")


def dtypes(args, default=("fp32", "fp16", "bf16")) -> list[str]:
    """The chosen storage types.

    Raises
    ------
    Misuse
    """
    return list(default) if args.dtype is None else pick("--dtype", args.dtype, DTYPES, what="storage type")


def add_on(parser):
    """--on"""
    parser.add_argument("--on", choices=("gpu", "emulator"), help="where kernels run; the GPU if there is one")


def executor(args) -> str:
    """ "gpu" or "emulated".

    Raises
    ------
    Misuse
        If a GPU is asked for and there is none.
    """
    if args.on is None:
        return executors.default()
    if args.on == "gpu" and executors.gpu_missing():
        raise Misuse(f"--on gpu: {executors.gpu_missing()}; leave it out to emulate")
    return "gpu" if args.on == "gpu" else "emulated"


def writable(argument, path) -> Path | None:
    """A file to write, checked before any work is done for it.

    Raises
    ------
    Misuse
        If its folder does not exist, or it is a folder itself.
    """
    if path is None:
        return None
    if path in ("", "-"):
        raise Misuse(f"{argument}: expected the name of a file to write, got {path!r}")
    path = Path(path)
    if path.is_dir():
        raise Misuse(f"{argument}: expected a file to write, {path} is a folder")
    if not path.absolute().parent.is_dir():
        raise Misuse(f"{argument}: expected a file in an existing folder, there is no {path.absolute().parent}")
    return path


def readable(argument, path) -> Path:
    """A file to read.

    Raises
    ------
    Misuse
        If it is not there.
    """
    path = Path(path)
    if not path.is_file():
        raise Misuse(f"{argument}: expected a file, there is none at {path}")
    return path


def positive(argument, text) -> list[int]:
    """Comma-separated positive integers.

    Raises
    ------
    Misuse
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise Misuse(f"{argument}: expected positive integers, got {text!r}")
    return numbers


def one(argument, text) -> int:
    """A single positive integer.

    Raises
    ------
    Misuse
    """
    numbers = positive(argument, text)
    if len(numbers) > 1:
        raise Misuse(f"{argument}: expected one number, got {text!r}")
    return numbers[0]


def alone(option, args, declare, *beside):
    """Refuse options that would have no effect beside one.

    Parameters
    ----------
    option : str
        Such as "--check".
    args : argparse.Namespace
    declare : callable
        Adds a command's options to a parser.
    *beside : str
        Names of those that go with it.

    Raises
    ------
    Misuse
    """
    parser = argparse.ArgumentParser()
    declare(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name not in (option.removeprefix("--"), *beside) and getattr(args, name) != default:
            raise Misuse(f"--{name}: has no effect beside {option}; leave it out")
