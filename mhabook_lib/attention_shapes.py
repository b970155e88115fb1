"""The shape of an attention layer and, in whole numbers, what of it no data can identify.

All counts hold for softmax attention at generic parameters and for enough generic sequences
(`finite_data.py` says how many). Frequencies of rotary positions are distinct unless given.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .attention_layer import require_groups, require_rotary_dim, weight_shapes
from .validation import require_finite

QK_NORMS = (None, "plain", "gain")


class Count(NamedTuple):
    """Unidentified directions by where they are: query-key, output-value, biases, latents."""

    qk: int
    ov: int
    bias: int = 0
    latent: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Blocks(NamedTuple):
    """Coordinates of a head by the frequency with which they turn.

    `still` coordinates do not turn, `flipping` ones turn by exactly pi, and `planes` lists how
    many planes share each other frequency.
    """

    still: int
    flipping: int
    planes: tuple[int, ...]


def frequency_blocks(frequencies, d_head: int, tol: float = 1e-12) -> Blocks:
    """Sort the planes of a head by frequency.

    Positions are integers, so that frequencies count modulo 2 pi and up to their sign. Raises
    ValueError for more planes than fit in the head and for values that are not finite.
    Source: identification.T7.

    >>> frequency_blocks([0.7, -0.7, 2 * math.pi - 0.7, math.pi], 10)
    Blocks(still=2, flipping=2, planes=(3,))
    """
    require_finite("frequencies", frequencies)
    require_rotary_dim(2 * len(frequencies), d_head)
    angles = np.mod(np.asarray(frequencies, dtype=float), 2 * np.pi)
    angles = np.sort(np.minimum(angles, 2 * np.pi - angles))  # in [0, pi]
    still, flipping = angles <= tol, angles >= np.pi - tol
    others = angles[~still & ~flipping]
    runs = np.split(others, np.flatnonzero(np.diff(others) > tol) + 1)
    return Blocks(
        still=d_head - 2 * len(angles) + 2 * int(still.sum()),
        flipping=2 * int(flipping.sum()),
        planes=tuple(len(run) for run in runs if len(run)),
    )


def commutant_dimension(frequencies, d_head: int, tol: float = 1e-12) -> int:
    """Dimension of the matrices that commute with the rotations, `n_0^2 + n_pi^2 + sum 2 m_j^2`.

    Raises as `frequency_blocks`. Source: identification.T7.

    >>> commutant_dimension([1.0, 0.1], 4), commutant_dimension([1.0, 1.0], 4)
    (4, 8)
    """
    still, flipping, planes = frequency_blocks(frequencies, d_head, tol)
    return still**2 + flipping**2 + sum(2 * m**2 for m in planes)


def product_kernel(width: int, left: int, right: int) -> int:
    """Null directions of `(A, B) -> A^T B` at generic A (width, left) and B (width, right).

    `width (left + right) - r (left + right - r)` with `r = min(width, left, right)`; `width^2` when
    neither side is narrower. Source: identification.T5.

    >>> product_kernel(3, 8, 8), product_kernel(4, 1, 1)
    (9, 7)
    """
    r = min(width, left, right)
    return width * (left + right) - r * (left + right - r)


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one layer, with exact counts.

    `d_model` E, `num_heads` H, `groups` G (default H), `d_head` D (default E/H), `d_value` C
    (default D), `rotary_dim` rotated coordinates of each head, `biases` some of "qkvo",
    `qk_norm` None, "plain" or "gain" (gains shared by the heads), `memory_dim` the width read by
    keys and values in cross-attention, `output_projection` False for the single head without W_O.
    Raises ValueError for shapes that do not exist and for those without a known count; warns when
    a head is wider than the model. Source: identification.T5-T8, X1, X3, X5.

    >>> AttentionShape(8, 2).unidentified_count().total, AttentionShape(8, 2).parameter_count()
    (64, 256)
    """

    d_model: int
    num_heads: int
    groups: int | None = None
    d_head: int | None = None
    d_value: int | None = None
    rotary_dim: int = 0
    biases: str = ""
    qk_norm: str | None = None
    memory_dim: int | None = None
    output_projection: bool = True

    def __post_init__(self):
        if self.d_model < 1:
            raise ValueError(f"d_model={self.d_model}: expected an integer >= 1")
        require_groups(self.num_heads, self.num_heads if self.groups is None else self.groups)
        if self.d_head is None and self.d_model % self.num_heads:
            raise ValueError(
                f"d_model={self.d_model}, num_heads={self.num_heads}: expected a d_head, "
                "since the heads do not divide the model"
            )
        d_head = self.d_model // self.num_heads if self.d_head is None else self.d_head
        filled = {
            "groups": self.groups or self.num_heads,
            "d_head": d_head,
            "d_value": d_head if self.d_value is None else self.d_value,
            "memory_dim": self.memory_dim or self.d_model,
        }
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self):
        for name in ("d_head", "d_value", "memory_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected an integer >= 1")
        require_rotary_dim(self.rotary_dim, self.d_head)
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm={self.qk_norm!r}: expected one of {QK_NORMS}")
        narrow = min(self.d_model, self.memory_dim)
        if self.qk_norm and not 2 <= self.d_head <= narrow:
            raise ValueError(
                f"qk_norm={self.qk_norm!r} with d_head={self.d_head}: expected 2 <= d_head <= "
                f"{narrow}; no count is known otherwise"
            )
        if "o" in self.biases and not self.output_projection:
            raise ValueError(f"biases={self.biases!r}: expected no 'o' without output projection")
        if max(self.d_head, self.d_value) > narrow:
            warnings.warn(
                f"d_head={self.d_head}, d_value={self.d_value} above the model's {narrow}: "
                "a head has more than D^2 + C^2 unidentified directions",
                stacklevel=4,
            )

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name, as in `attention_layer.weight_shapes`."""
        return weight_shapes(
            self.num_heads,
            self.d_model,
            self.d_head,
            groups=self.groups,
            d_value=self.d_value,
            memory_dim=self.memory_dim,
            biases=self.biases,
            gains=self.qk_norm == "gain",
            output_projection=self.output_projection,
        )

    def parameter_count(self) -> int:
        """P, the number of parameters of the layer."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def unidentified_count(self, frequencies=None) -> Count:
        """u, the number of unidentified directions.

        `frequencies` of the rotated planes, where they are not distinct. Raises ValueError unless
        there are `rotary_dim / 2` of them.
        """
        if frequencies is None:
            distinct = (1,) * (self.rotary_dim // 2)
            blocks = Blocks(self.d_head - self.rotary_dim, 0, distinct)
        elif 2 * len(frequencies) != self.rotary_dim:
            raise ValueError(
                f"{len(frequencies)} frequencies: expected rotary_dim/2={self.rotary_dim // 2}"
            )
        else:
            blocks = frequency_blocks(frequencies, self.d_head)
        qk = self._normed_qk(blocks) if self.qk_norm else self._plain_qk(blocks)
        return Count(qk, self._ov(), self._bias(blocks))

    def share(self) -> float:
        """u / P."""
        return self.unidentified_count().total / self.parameter_count()

    def _plain_qk(self, blocks: Blocks) -> int:
        """Each block of one frequency is a product of its own, over R or over C."""
        queries = self.num_heads // self.groups * (self.d_model + ("q" in self.biases))
        keys = self.memory_dim + ("k" in self.biases)  # a bias of a turning key is alive
        count = product_kernel(blocks.still, queries, self.memory_dim)
        count += product_kernel(blocks.flipping, queries, keys)
        count += sum(2 * product_kernel(m, queries, keys) for m in blocks.planes)
        return self.groups * count

    def _normed_qk(self, blocks: Blocks) -> int:
        """One scale for each query head and key group, and what commutes with norm and gains."""
        scales = self.num_heads + self.groups
        if self.qk_norm == "gain":
            return scales + blocks.still + blocks.flipping + sum(blocks.planes)
        rotations = sum(n * (n - 1) // 2 for n in (blocks.still, blocks.flipping))
        return scales + self.groups * (rotations + sum(m**2 for m in blocks.planes))

    def _ov(self) -> int:
        if not self.output_projection:
            return 0
        outputs = self.num_heads // self.groups * self.d_model
        return self.groups * product_kernel(self.d_value, outputs, self.memory_dim)

    def _bias(self, blocks: Blocks) -> int:
        """Key biases of coordinates that do not turn, and value biases merged into one offset."""
        dead_keys = blocks.still * self.groups if "k" in self.biases and not self.qk_norm else 0
        offsets = self.groups * self.d_value
        if "v" not in self.biases or not self.output_projection:
            return dead_keys
        visible = 0 if "o" in self.biases else min(offsets, self.d_model)
        return dead_keys + offsets - visible


@dataclass(frozen=True)
class LatentShape:
    """Shape of one layer of multi-head latent attention, with exact counts.

    Keys and values pass a latent of width `d_latent` shared by the heads, queries one of width
    `d_query` (None: no latent). A head has `d_plain` coordinates without position, `d_rotary`
    rotated ones, whose key all heads share, and `d_value` value coordinates. `normed`: RMSNorm
    with gains on the latents. Raises ValueError where the count needs other conditions.
    Source: identification.X4.

    >>> LatentShape(8, 2, 5, 6, 2, 2, 2).unidentified_count().total
    79
    """

    d_model: int
    num_heads: int
    d_latent: int
    d_query: int | None = None
    d_plain: int = 1
    d_rotary: int = 0
    d_value: int = 1
    normed: bool = False

    def __post_init__(self):
        require_rotary_dim(self.d_rotary)
        heads, query = self.num_heads, self.d_query or self.d_model
        limits = {
            "d_latent": (self.d_latent, min(heads * (self.d_plain + self.d_value), self.d_model)),
            "d_query": (
                self.d_query or 0,
                min(heads * (self.d_plain + self.d_rotary), self.d_model),
            ),
            "d_plain": (self.d_plain, min(self.d_latent, query)),
            "d_value": (self.d_value, min(self.d_latent, self.d_model)),
        }
        for name, (value, top) in limits.items():
            if value > top:
                raise ValueError(f"{name}={value}: expected at most {top} in this shape")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name, as `latent_attention.latent_forward` reads them."""
        heads, d_model, d_latent = self.num_heads, self.d_model, self.d_latent
        query = self.d_query or d_model
        shapes = {"down_q": (self.d_query, d_model)} if self.d_query else {}
        shapes |= {
            "down_kv": (d_latent, d_model),
            "rotary_k": (1, self.d_rotary, d_model),
            "up_q": (heads, self.d_plain + self.d_rotary, query),
            "up_k": (heads, self.d_plain, d_latent),
            "up_v": (heads, self.d_value, d_latent),
            "w_o": (heads, d_model, self.d_value),
        }
        if self.normed:
            shapes |= {"gain_q": (self.d_query,)} if self.d_query else {}
            shapes |= {"gain_kv": (d_latent,)}
        return shapes

    def parameter_count(self) -> int:
        """P, the number of parameters of the layer."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def unidentified_count(self) -> Count:
        """u, the number of unidentified directions."""
        latents = [self.d_latent] + ([self.d_query] if self.d_query else [])
        inside = sum(d * (d - 1) // 2 + 1 + d if self.normed else d**2 for d in latents)
        qk = self.num_heads * self.d_plain**2 + self.d_rotary
        return Count(qk, self.num_heads * self.d_value**2, latent=inside)

    def share(self) -> float:
        """u / P."""
        return self.unidentified_count().total / self.parameter_count()


# One head against many


def matching_width(d_model: int, num_heads: int) -> int:
    """Smallest width E_0 of a full single head that has as many identified dimensions.

    `ceil(E sqrt(2 - 1/H))` for heads of size E/H, in whole numbers. Source: identification.T10.

    >>> matching_width(768, 12)
    1064
    """
    squared = -(-(d_model**2) * (2 * num_heads - 1) // num_heads)  # rounded up
    root = math.isqrt(squared)
    return root + (root**2 < squared)


def matching_head_size(d_model: int, num_heads: int, d_head: int) -> int | None:
    """Size D_0 of one head, without W_O, of the same width with as many identified dimensions.

    `D_0 = E - sqrt(2 E^2 - 4 E H D + 2 H D^2)` where that is a whole number from 1 to E, else
    None. Source: identification.T10.

    >>> matching_head_size(8, 2, 2), matching_head_size(8, 2, 4)
    (4, None)
    """
    square = 2 * (d_model**2 - 2 * d_model * num_heads * d_head + num_heads * d_head**2)
    root = math.isqrt(max(square, 0))
    if square < 0 or root**2 != square or root >= d_model:
        return None
    return d_model - root
