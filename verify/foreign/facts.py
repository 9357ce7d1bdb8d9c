"""What is known of a stranger's kernel before it is judged, and what a case asks of one."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Facts:
    """What is known of a kernel before it is judged.

    Attributes
    ----------
    arrays, layout, executor, device : str
        How it is called and where it runs.
    why_arrays, why_layout : str
        Who said so.
    options : tuple of str
        Parameters that its signature names for options.
    small : bool
        It runs the small shapes; why_small says for what reason, if it was not asked for.
    refused : dict
        Word of `foreign.WORDS`, ("dtype", name) or ("head dim", d, dv) -> why it is not judged on that.
    always_causal : bool
        It masks without being told to.
    gradients : str
        Where they come from; empty if there are none.
    d : int
        Head dim at which cases of the usual one are run, as `fitted` has it; 0 leaves them as they are. why_d says why.
    hints : tuple of str
        What a probe showed that belongs beside the verdict, as the runs cannot show it.
    died : tuple of str
        Probes that never answered, or ended the process: a fault, whatever the runs say.
    failure : str
        Why nothing can be judged; empty if something can.
    """

    arrays: str = ""
    why_arrays: str = ""
    layout: str = "bhsd"
    why_layout: str = "the default"
    executor: str = "cpu"
    device: str = ""
    options: tuple = ()
    small: bool = False
    why_small: str = ""
    refused: dict = field(default_factory=dict)
    always_causal: bool = False
    gradients: str = ""
    says: dict = field(default_factory=dict)
    lse: bool = False
    notes: tuple = ()
    d: int = 0
    why_d: str = ""
    hints: tuple = ()
    died: tuple = ()
    failure: str = ""

    def refuses(self, case, dtype) -> str | None:
        """Why the kernel is not run on a case in a storage type; None if it is."""
        s = case.shape(self.small)
        if self.always_causal and not case.causal:
            return "is always causal (probed: its output is that of causal attention)"
        for key in (("dtype", dtype), ("head dim", s.d, s.dv), *sorted(words(case, self.small))):
            if key in self.refused:
                return self.refused[key]
        return None


def usual(small) -> int:
    """The head dim of cases that are not about head dims."""
    return 8 if small else 64


def fitted(case, d, small):
    """A case of the usual head dim at another, in the shape that is run; any other case as it is.

    Parameters
    ----------
    case : Case
    d : int
        0 leaves it as it is.
    small : bool
    """
    s = case.shape(small)
    if not d or s.d != usual(small):
        return case
    return replace(case, **{"small" if small else "full": s._replace(d=d, dv=s.dv * d // s.d)})


def words(case, small) -> set[str]:
    """What a case asks of a kernel, in the words of `foreign.WORDS`."""
    s, tile = case.shape(small), 16 if small else 64
    cross = s.Nq != s.Nk
    aligned = cross and (case.causal or {"window", "alibi"} & case.needs)
    asked = {
        "scale": case.scale is not None,
        "negative_scale": case.scale is not None and case.scale < 0,
        "unaligned": case.layout == "offset",
        "ragged": any(n % tile for n in (s.Nq, s.Nk)),
        "cross": cross,
        "wide_v": s.d != s.dv,
        "causal_cross": cross and case.causal,
        "no_keys": s.Nk == 0,
        "bottom_right": aligned and case.align == "bottom_right",
        "top_left": aligned and case.align == "top_left",
    }
    # Alignment is told apart here; NaN, and rows that see no key, by the run.
    needs = case.needs - {"top_left", "nan_hidden", "nan_seen"}
    return needs | {word for word, is_asked in asked.items() if is_asked}
