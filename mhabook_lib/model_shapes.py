"""Published models: their attention layers, what of them is unidentified, and yours beside them."""

from __future__ import annotations

import math
import tomllib
from importlib import resources
from typing import NamedTuple

from .attention_shapes import AttentionShape, LatentShape
from .plotting import PALETTE, label

LayerShape = AttentionShape | LatentShape


class Model(NamedTuple):
    """A published model: the shape of its attention layers, their number, and where it stands."""

    name: str
    layer: LayerShape
    layers: int
    source: str


def known_models() -> list[Model]:
    """The models of `mhabook_lib/data/model_shapes.toml`, in its order.

    Source: identification.X5.

    >>> known_models()[1].layer.num_heads
    12
    """
    path = resources.files("mhabook_lib.data") / "model_shapes.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    kinds = {"attention": AttentionShape, "latent": LatentShape}
    return [
        Model(entry.pop("name"), kind(**entry), layers, source)
        for key, kind in kinds.items()
        for entry in table[key]
        for layers, source in [(entry.pop("layers"), entry.pop("source"))]
    ]


def layer_summary(layer: LayerShape) -> str:
    """Parameters, unidentified directions by kind, and their share, as a few lines of text.

    Source: identification.X5.

    >>> print(layer_summary(AttentionShape(8, 2)).splitlines()[0])
    parameters                            256
    """
    count = layer.unidentified_count()
    lines = {
        "parameters": layer.parameter_count(),
        "unidentified, query-key": count.qk,
        "unidentified, output-value": count.ov,
        "unidentified, biases": count.bias,
        "unidentified, latents": count.latent,
        "unidentified, all": count.total,
    }
    rows = [f"{name:<28}{value:>13,}" for name, value in lines.items()]
    return "\n".join([*rows, f"{'share':<28}{100 * layer.share():>13.4f} %"])


def plot_against_known(axis, layer: LayerShape | None = None, name: str = "yours"):
    """Parameters of a layer against its unidentified share, known models and one more.

    Models within five per cent of one another share a point and a label.
    """
    places: dict[tuple[int, int], list[Model]] = {}
    for model in sorted(known_models(), key=lambda m: m.layer.parameter_count()):
        values = model.layer.parameter_count(), model.layer.share()
        key = tuple(round(20 * math.log(value)) for value in values)
        places.setdefault(key, []).append(model)
    for key, (first, *others) in places.items():
        place = first.layer.parameter_count(), 100 * first.layer.share()
        latent = isinstance(first.layer, LatentShape)
        colour = PALETTE["purple" if latent else "blue"]
        axis.plot(*place, "s" if latent else "o", color=colour, ms=4.5)
        crowded = any(0 < x - key[0] < 18 and abs(y - key[1]) < 9 for x, y in places)
        offset, side = ((-5, 3), "right") if crowded else ((5, 3), "left")
        style = {"textcoords": "offset points", "ha": side, "fontsize": 7.5, "color": "0.3"}
        names = ", ".join(model.name for model in (first, *others))
        axis.annotate(names, place, xytext=offset, **style)
    axis.margins(0.12, 0.1)
    if layer is not None:
        place = layer.parameter_count(), 100 * layer.share()
        axis.plot(*place, "*", color=PALETTE["orange"], ms=15)
        axis.annotate(
            name, place, xytext=(9, -9), textcoords="offset points", color=PALETTE["orange"]
        )
    return label(
        axis,
        "attention layers",
        "parameters of the layer",
        "unidentified share (%)",
        xscale="log",
        yscale="log",
    )
