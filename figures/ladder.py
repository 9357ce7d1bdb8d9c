"""What each idea bought: measured rates of all steps at one size, under the ceilings of the chip they ran on."""

from dataclasses import dataclass
from pathlib import Path

from figures import records
from figures.devices import DEVICES, Device
from figures.style import INK, MUTED, STEP_COLOUR, Picture, picture, styled
from verify.document import RECORDS

SIZE = {"B": 1, "H": 16, "N": 16384}  # one sequence: the size at which records of the steps and of the suite meet
DIMS = (64, 128)
STEPS = tuple(step for step in STEP_COLOUR if step != "step7_fp8")
BASELINE = "standard_tensor_core"  # step 0's three kernels with the products of step 5: below those it is no step up
RUNGS = (*STEPS[:5], BASELINE, *STEPS[5:])
PEERS = {"sdpa_flash": "SDPA, flash", "sdpa_cudnn": "SDPA, cuDNN", "sdpa_efficient": "SDPA, efficient"}


@dataclass(frozen=True)
class Rung:
    """One kernel's time at the size.

    Attributes
    ----------
    name : str
        Of a step, or of a peer.
    d : int
    causal : bool
    ms : float
        Median.
    stale : bool
        A step that was changed since.
    """

    name: str
    d: int
    causal: bool
    ms: float
    stale: bool = False

    @property
    def tflops(self) -> float:
        """Rate in 1e12 operations a second, counted as 4 B H N^2 d, half of it when causal."""
        flops = 4 * SIZE["B"] * SIZE["H"] * SIZE["N"] ** 2 * self.d
        return (flops // 2 if self.causal else flops) / self.ms / 1e9


@dataclass(frozen=True)
class Ladder:
    """All rungs that are on record.

    Attributes
    ----------
    rungs : list of Rung
    device : Device or None
        Whose ceilings are drawn; None if none of the records' devices is known.
    reached : float or None
        What large products of 16-bit operands reach there, measured, in TFLOP/s.
    missing : tuple of str
        Of `RUNGS`, and "peers", without a time at this size.
    note : str
        Where and when.
    """

    rungs: list[Rung]
    device: Device | None
    reached: float | None
    missing: tuple[str, ...]
    note: str

    def best(self, name: str, d: int, causal: bool) -> Rung | None:
        """The rung of that name, or None."""
        return next((r for r in self.rungs if (r.name, r.d, r.causal) == (name, d, causal)), None)


def data_rungs(folder: Path = RECORDS) -> Ladder:
    """fp16 forward times of the newest record of times and the newest one of the suite, which wins where both have one.

    Only records of one device are put side by side: those of the device of the newest.
    """
    documents = [found for kind in ("times", "suite") if (found := records.newest(kind, folder))]
    if not documents:
        return Ladder([], None, None, (*RUNGS, "peers"), "no record of times yet")
    name = max(documents, key=lambda record: record["made"])["device"]
    documents = [record for record in documents if record["device"] == name]
    rungs: dict[tuple, Rung] = {}
    for record in documents:
        rungs |= _steps(folder, record["kind"]) | _peers(record)
    missing = tuple(name for name in RUNGS if not any(key[0] == name for key in rungs))
    missing += ("peers",) if not any(key[0] in PEERS for key in rungs) else ()
    device = next((d for d in DEVICES if d.name in name), None)
    measured = [(record.get("ceilings") or {}).get("measured") or {} for record in documents]
    reached = next((m["tflops"] for m in reversed(measured) if m.get("tflops")), None)
    dates = " and ".join(sorted({record["made"][:10] for record in documents}))
    return Ladder(list(rungs.values()), device, reached, missing, f"{name}, {dates}")


def _steps(folder, kind) -> dict:
    """Our rungs in the newest record of a kind."""
    size = {"B": SIZE["B"], "Hq": SIZE["H"], "Hk": SIZE["H"], "Nq": SIZE["N"], "Nk": SIZE["N"]}
    return {
        (p.kernel, p.size["d"], p.causal): Rung(p.kernel, p.size["d"], p.causal, p.median_ms, p.stale)
        for p in records.times(folder, kind)
        if p.kernel in RUNGS and p.dtype == "fp16" and p.size["d"] in DIMS and p.has(**size)
    }


def _peers(record) -> dict:
    """The peers' rungs in a record."""
    return {
        (row["name"], row["d"], row["causal"]): Rung(row["name"], row["d"], row["causal"], row["median_ms"])
        for row in record["rows"]
        if row.get("name") in PEERS and "median_ms" in row and row["direction"] == "forward"
        and row["dtype"] == "fp16" and row["d"] in DIMS and all(row[key] == SIZE[key] for key in SIZE)
    }  # fmt: skip


@styled
def fig_rungs(data: Ladder) -> Picture:
    """Draw a line a kernel and a panel a head dim: the rate without a mask (dot) and with a causal one (ring)."""
    figure = picture("tall")
    figure.set_size_inches(7.6, 5.2)
    names = [*RUNGS, *PEERS]
    panels = figure.subplots(1, len(DIMS), sharey=True)
    for ax, d in zip(panels, DIMS, strict=True):
        _ceilings(ax, data)
        for y, name in enumerate(names):
            _rung(ax, data, y, name, d)
        ax.axhline(len(RUNGS) - 0.5, color=MUTED, linewidth=0.8)
        ax.set(xscale="log", xlim=(0.1, 1800), ylim=(len(names) - 0.4, -0.6), title=f"d = {d}", xlabel="TFLOP/s")
        ax.set_xticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
        ax.minorticks_off()
        ax.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(names)), [PEERS.get(name, name) for name in names])
    panels[0].set_ylabel("kernel")
    lost = f"\nNo time on record: {', '.join(data.missing)}" if data.missing else ""
    size = f"fp16, {SIZE['H']} heads, N = {SIZE['N']:,}"
    figure.suptitle(f"The ladder, measured: {data.note}; {size}{lost}", fontsize=10)
    key = {"color": INK, "linestyle": ""}
    panels[0].plot([], [], "o", label="no mask, ms beside it", **key)
    panels[0].plot([], [], "o", markerfacecolor="white", label="causal, half the operations counted", **key)
    if any(rung.stale for rung in data.rungs):
        panels[0].plot([], [], "x", label="changed since", **key)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _rung(ax, data, y, name, d) -> None:
    """One kernel's two marks, and its time in words."""
    colour = STEP_COLOUR.get(name, STEP_COLOUR["step0_standard"] if name == BASELINE else MUTED)
    full, causal = (data.best(name, d, flag) for flag in (False, True))
    if full is None and causal is None:
        ax.annotate("no record", (0.13, y), va="center", fontsize=8, color=MUTED)
        return
    for rung, face, shift in ((full, colour, -0.13), (causal, "white", 0.13)):
        if rung:
            ax.plot(rung.tflops, y + shift, "o", color=colour, markerfacecolor=face, zorder=3)
            if rung.stale:
                ax.plot(rung.tflops, y + shift, "x", color=INK, markersize=4, zorder=4)
    if full:
        # To the right stand the ceilings and their names.
        side = {"xytext": (-7, 0), "ha": "right"} if full.tflops > 4 else {"xytext": (7, 0), "ha": "left"}
        words = f"{full.ms:,.1f} ms" if full.ms >= 10 else f"{full.ms:.2f} ms"
        side |= {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.6}, "fontsize": 7}
        ax.annotate(words, (full.tflops, y - 0.13), textcoords="offset points", va="center", **side)


def _ceilings(ax, data) -> None:
    """The chip's rates as vertical lines, named along them: published ones dashed, a measured one solid."""
    marks = []
    if data.device:
        published = {"fp32, data sheet": data.device.fp32_tflops, "fp16 tensor, data sheet": data.device.fp16_tflops}
        marks = [(value, words, "--") for words, value in published.items()]
    if data.reached:
        marks.append((data.reached, "large products, measured", "-"))
    for value, words, dashes in marks:
        ax.axvline(value, color=MUTED, linewidth=1, linestyle=dashes, zorder=1)
        side = {"xytext": (3, 0), "ha": "left"} if dashes == "--" else {"xytext": (-3, 0), "ha": "right"}
        place = {"textcoords": "offset points", "rotation": 90, "va": "top", "fontsize": 7, "color": MUTED}
        ax.annotate(f"{words} {value:,.4g}", (value, -0.5), **side, **place)
