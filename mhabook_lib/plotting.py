"""One look for all figures: style, palette, and the few panel shapes the book uses."""

from __future__ import annotations

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


def panels(rows: int = 1, cols: int = 1, *, height: float = 2.9, width: float = 8.0, **kwargs):
    """A figure of the book's width with `rows` x `cols` panels; axes as in `plt.subplots`."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(rows, cols, figsize=(width, height * rows), **kwargs)
    return figure, axes


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
