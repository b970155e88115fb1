"""One look for all figures: style, palette, and the few panel shapes the book uses."""

from __future__ import annotations

import base64
import html
import io

import matplotlib.pyplot as plt
import numpy as np

from mhabook_lib.book.checks import as_array

# Okabe and Ito's eight colours, told apart by readers with any form of colour vision.
PALETTE = {
    "blue": "#0072B2",
    "orange": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "amber": "#E69F00",
    "yellow": "#F0E442",
    "black": "#000000",
}
COLOURS = list(PALETTE.values())[:6]
DASHES = ["-", "--", "-.", ":"]

STYLE = {
    "figure.dpi": 160,
    "savefig.dpi": 200,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.prop_cycle": plt.cycler(color=COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "lines.linewidth": 1.6,
    "mathtext.fontset": "dejavusans",
    "image.cmap": "viridis",
    "figure.constrained_layout.use": True,
}


def use_style() -> None:
    """Draw all figures from now on in the book's style."""
    plt.rcParams.update(STYLE)


def panels(rows: int = 1, cols: int = 1, *, height: float = 2.9, width: float = 8.0):
    """A figure of the book's width with `rows` x `cols` panels; axes as in `plt.subplots`."""
    return plt.subplots(rows, cols, figsize=(width, height * rows))


def stacked(heights, *, width: float = 10.0):
    """A figure with one subfigure above the other, of the given heights in inches."""
    figure = plt.figure(figsize=(width, sum(heights)))
    return figure, figure.subfigures(len(heights), 1, height_ratios=heights)


def label(axis, title: str = "", x: str = "", y: str = "", **limits):
    """Title, axis labels and, through `axis.set`, anything else."""
    axis.set(title=title, xlabel=x, ylabel=y, **limits)
    return axis


def curves(axis, x, ys, labels, *, colours=None, dash="-", **style):
    """One line per row of `ys` over the common abscissa `x`."""
    x, ys = as_array(x), np.atleast_2d(as_array(ys))
    for k, (y, name) in enumerate(zip(ys, labels, strict=True)):
        colour = (colours or COLOURS)[k % len(colours or COLOURS)]
        axis.plot(x, y, dash, color=colour, label=name, **style)
    return axis


def heat_map(axis, x, y, values, *, colour_bar: str = "", **style):
    """`values[k, j]` at (x[j], y[k]) as a coloured map, with a colour bar if it has a name."""
    mesh = axis.pcolormesh(
        as_array(x), as_array(y), as_array(values), shading="nearest", rasterized=True, **style
    )
    if colour_bar:
        axis.figure.colorbar(mesh, ax=axis, label=colour_bar)
    return mesh


def ratio_map(axis, x, y, ratio):
    """A positive ratio on a diverging logarithmic scale, white at 1, with the contour 1."""
    logs = np.log2(as_array(ratio))
    top = np.abs(logs).max()
    name = r"$\log_2$ of the ratio"
    heat_map(axis, x, y, logs, cmap="PuOr_r", vmin=-top, vmax=top, colour_bar=name)
    if logs.min() < 0 < logs.max():
        axis.contour(as_array(x), as_array(y), logs, levels=[0], colors="k", linewidths=1.4)
    return axis


def sign_map(axis, x, y, values, names):
    """Two regions, `values > 0` and `values < 0`, named in that order, and the line between."""
    x, y, values = map(as_array, (x, y, values))
    fills = [PALETTE["amber"], PALETTE["sky"]]
    axis.contourf(x, y, values, levels=[-np.inf, 0, np.inf], colors=fills)
    axis.contour(x, y, values, levels=[0], colors="white", linewidths=2)
    for name, region in zip(names, (values > 0, values < 0), strict=True):
        row, column = np.nonzero(region)
        axis.text(x[column].mean(), y[row].mean(), name, ha="center", va="center", fontsize=8.5)
    return axis


def globe(axis, points, labels):
    """Points (n, 3) of the unit sphere seen from the front; those behind are pale."""
    points, labels = as_array(points), as_array(labels)
    angle = np.linspace(0, 2 * np.pi, 200)
    axis.plot(np.cos(angle), np.sin(angle), color="0.6", lw=0.8)
    colours = np.array(COLOURS)[labels % len(COLOURS)]
    front = points[:, 0] >= 0
    for side, opacity in ((~front, 0.25), (front, 1.0)):
        axis.scatter(*points[side, 1:].T, c=colours[side], s=14, alpha=opacity, lw=0)
    axis.set(aspect="equal", xlim=(-1.08, 1.08), ylim=(-1.08, 1.08))
    axis.axis("off")
    return axis


class Animation:
    """Frames of equal size as one small moving picture, with a still for print and quiet screens.

    figures: drawn one after the other, closed here; `alt` says what is seen.
    """

    def __init__(self, figures, milliseconds: int, alt: str, caption: str, dpi: int = 80):
        from PIL import Image

        self.alt, self.caption, frames = alt, caption, []
        for figure in figures:
            buffer = io.BytesIO()
            figure.savefig(buffer, dpi=dpi)
            plt.close(figure)
            frames.append(Image.open(buffer).convert("P", palette=Image.Palette.ADAPTIVE))
        moving = io.BytesIO()
        frames[0].save(
            moving,
            "GIF",
            save_all=True,
            append_images=frames[1:],
            duration=[milliseconds] * (len(frames) - 1) + [12 * milliseconds],
            loop=0,
            optimize=True,
        )
        self.moving, self.still = moving.getvalue(), buffer.getvalue()

    def _repr_html_(self) -> str:
        gif, png = (base64.b64encode(data).decode() for data in (self.moving, self.still))
        quiet = "(prefers-reduced-motion: reduce), print"
        return (
            f'<figure><picture><source media="{quiet}" srcset="data:image/png;base64,{png}">'
            f'<img src="data:image/gif;base64,{gif}" alt="{html.escape(self.alt)}"></picture>'
            f"<figcaption>{html.escape(self.caption)}</figcaption></figure>"
        )

    def _repr_png_(self) -> bytes:
        return self.still


def show(figure):
    """Close the figure, so that it is not drawn twice, and return it as the cell's output."""
    plt.close(figure)
    return figure
