"""Where each step sits under the roofs of three GPUs: intensity by formula, roofs from data sheets."""

from dataclasses import dataclass, field

import numpy as np

from figures import records
from figures.devices import DEVICES, Device
from figures.hbm_traffic import fills, least
from figures.style import INK, MUTED, STEP_COLOUR, Picture, picture, styled
from refimpl.tiling import DEFAULT_TILE

N, D = 4096, 64  # length and head dimension, in fp16
STEPS = ("step0_standard", "step2_flash_v1", "step1_fused", "step3_flash_v2")


@dataclass(frozen=True)
class Roofline:
    """Intensities of the steps, and the devices whose roofs are drawn.

    Attributes
    ----------
    intensity : dict of str to float
        FLOP a byte, by step: 4 N² d operations over the bytes of the tile fills ledger.
    compulsory : float
        The same over the least bytes that any method can move.
    devices : tuple of Device
        The last one is where the steps are drawn.
    note : str
    measured : list of (step, intensity, TFLOP/s, device name)
    """

    intensity: dict
    compulsory: float
    devices: tuple[Device, ...]
    note: str
    measured: list = field(default_factory=list)


def data_steps() -> Roofline:
    """One head, at the tile that the record's kernels used, or the default one without a record."""
    flops = 4 * N * N * D
    size = {"Nq": N, "Nk": N, "d": D}
    points = [p for p in records.times() if p.dtype == "fp16" and not p.causal and p.has(**size)]
    tile = points[0].tile if points else DEFAULT_TILE
    intensity = {step: flops / fills(step, N, tile, d=D) for step in STEPS}
    measured = [(p.kernel, intensity[p.kernel], p.tflops, p.device) for p in points if p.kernel in STEPS]
    note = f"N = {N}, d = {D}, fp16, tile {tile.Br}×{tile.Bc}"
    return Roofline(intensity, flops / least(N, D), DEVICES, note, measured)


@styled
def fig_steps(data: Roofline) -> Picture:
    """Draw the roofs, a line up at each step's intensity, and measured points.

    Parameters
    ----------
    data : Roofline
    """
    figure = picture()
    figure.set_size_inches(7.6, 4.8)
    ax = figure.subplots()
    ax.set(xscale="log", yscale="log", xlim=(1, 1e4), ylim=(0.2, 4e4))
    _draw_roofs(ax, data.devices)
    at = data.devices[-1]
    marks = [(value, step, STEP_COLOUR[step], "-") for step, value in data.intensity.items()]
    left = 0.0
    for value, text, colour, dashes in sorted([*marks, (data.compulsory, "compulsory\nminimum", INK, "--")]):
        ax.axvline(value, color=colour, linewidth=1.2, linestyle=dashes)
        ax.plot(value, at.roof(value, at.fp32_tflops), "o", color=colour, markerfacecolor="white", zorder=3)
        # Each name stands left of its line, unless another line is too near for that.
        side = (
            {"xytext": (-2, -2), "ha": "right"} if value > 1.3 * left else {"xytext": (2, -2), "ha": "left"}
        )
        place = {"textcoords": "offset points", "rotation": 90, "va": "top", "fontsize": 8}
        ax.annotate(text, (value, ax.get_ylim()[1]), color=colour, **side, **place)
        left = value
    for step, value, tflops, _ in data.measured:
        ax.plot(value, tflops, "D", color=STEP_COLOUR[step], zorder=4)
    bound = f"bound of a step in fp32, {at.name}"
    ax.plot([], [], "o", color=INK, markerfacecolor="white", linestyle="", label=bound)
    for device in dict.fromkeys(device for *_, device in data.measured):
        ax.plot([], [], "D", color=INK, linestyle="", label=f"measured, {device}")
    ax.set_xticks([1, 10, 100, 1000, 10000], ["1", "10", "100", "1,000", "10,000"])
    ax.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    ax.minorticks_off()
    ax.set(xlabel="intensity, FLOP a byte (tile fills, by formula)", ylabel="TFLOP/s")
    ax.set_title(f"Roofline: {data.note}")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _draw_roofs(ax, devices) -> None:
    """Draw each device's memory roof and its two arithmetic roofs, and name the latter at the right."""
    x = np.logspace(0, 4, 400)
    for device, grey in zip(devices, np.linspace(0.72, 0.25, len(devices)), strict=True):
        label = f"memory, {device.name}: {device.hbm_gb_per_s:,} GB/s"
        ax.plot(x, device.roof(x, device.fp16_tflops), color=str(grey), linewidth=1.6, label=label)
        flat = x[x >= device.ridge(device.fp32_tflops)]
        ax.plot(flat, np.full(len(flat), device.fp32_tflops), color=str(grey), linewidth=1.6, linestyle="--")
    _name_roofs(ax, devices, x[-1])


def _name_roofs(ax, devices, right: float) -> None:
    """Write each roof's name at its right end; roofs of one height share a line."""
    for kind, attribute in (("fp16 tensor cores", "fp16_tflops"), ("fp32", "fp32_tflops")):
        heights: dict[float, list[str]] = {}
        for device in devices:
            heights.setdefault(getattr(device, attribute), []).append(device.name)
        for height, names in heights.items():
            text = f"{', '.join(names)}: {kind}\n{height:,.4g} TFLOP/s"
            ax.annotate(
                text,
                (right, height),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=MUTED,
            )
