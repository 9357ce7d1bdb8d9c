"""The one error of the command line: what was asked for makes no sense, said in one line."""

from difflib import get_close_matches


class Misuse(ValueError):
    """One line that names the argument and what was expected. The command line prints it and exits 2."""


def pick(argument, names, known, *, what, listed=""):
    """Choose names out of `known`, keeping the order of `known`.

    Parameters
    ----------
    argument : str
        The option as typed, such as "--cases".
    names : str or None
        Comma-separated names; None chooses all.
    known : iterable of str
    what : str
        What a name is the name of, such as "case".
    listed : str
        What to type to see all names.

    Returns
    -------
    list of str

    Raises
    ------
    Misuse
        For a name that is not known, with the nearest one that is; or if no name is left.
    """
    known = list(known)
    if names is None:
        return known
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            told = f"there is no {what} {name!r}; {suggest(name, known)}"
            raise Misuse(f"{argument}: {told}" + (f" ({listed} lists them)" if listed else ""))
    if not wanted:
        raise Misuse(f"{argument}: expected the name of a {what}, got {names!r}")
    return [name for name in known if name in wanted]


def suggest(name, known):
    """The nearest known name, or all of them if none is near."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
