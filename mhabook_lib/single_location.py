"""The single-location model: one of L Gaussian tokens carries a random mixture of F directions.

Token l has the projections `chi*_lf` on the hidden directions: standard normal, shifted by
`sqrt(nu_f) theta_f` at the hidden place, which is index 0 here. Heads have keys `k_h` with overlaps
`M (..., H, F)` and orthogonal Gram matrix `R (..., H, H)`; their logits are (..., H, L).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from .validation import require_count, require_finite

KINDS = ("softmax", "softmax1", "bsoftmax")


class HeadState(NamedTuple):
    """Order parameters of the keys: overlaps `M (..., H, F)`, orthogonal Gram `R (..., H, H)`."""

    overlaps: torch.Tensor
    gram: torch.Tensor

    @property
    def square_norms(self) -> torch.Tensor:
        """`q_h = |k_h|^2/D = |m_h|^2 + R_hh`, shape (..., H)."""
        return self.overlaps.square().sum(-1) + self.gram.diagonal(dim1=-2, dim2=-1)


def require_kind(kind: str) -> None:
    """Raise unless `kind` names one of the three activations."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {KINDS}")


@dataclass(frozen=True)
class _Law:
    strengths: tuple[float, ...]

    def __post_init__(self):
        require_finite("strengths", self.strengths)
        if len(self.strengths) == 0 or min(self.strengths) < 0:
            raise ValueError(f"strengths={self.strengths}: expected at least one, all >= 0")

    @property
    def num_features(self) -> int:
        return len(self.strengths)

    def amplitudes(self, like: torch.Tensor) -> torch.Tensor:
        """`sqrt(nu_f)`, shape (F,)."""
        return torch.as_tensor(self.strengths, dtype=like.dtype, device=like.device).sqrt()

    def atoms(self) -> torch.Tensor:
        """The values of `sqrt(nu_f) theta_f`, (A, F), equally likely; ValueError if continuous."""
        raise ValueError(f"law={self.name!r} is continuous: expected a law with atoms ('flip')")


@dataclass(frozen=True)
class FlippingSpike(_Law):
    """`theta_1 = 1`, `theta_f = +-1` fair and independent for f >= 2.

    >>> FlippingSpike((4.0, 1.0)).atoms()
    tensor([[ 2.,  1.],
            [ 2., -1.]])
    """

    name = "flip"

    @property
    def symmetric(self) -> tuple[bool, ...]:
        """Which features have mean zero."""
        return (False,) + (True,) * (self.num_features - 1)

    def theta(self, count, generator, dtype=torch.float64):
        """`count` (an integer or a shape) draws of theta, shape (count, F)."""
        shape = (*_shape(count), self.num_features)
        device = generator.device
        signs = 2 * torch.randint(2, shape, generator=generator, device=device).to(dtype) - 1
        signs[..., 0] = 1
        return signs

    def atoms(self) -> torch.Tensor:
        signs = product((1.0, -1.0), repeat=self.num_features - 1)
        theta = torch.tensor([(1.0, *s) for s in signs])
        return theta * self.amplitudes(theta)

    def log_evidence(self, projections: torch.Tensor) -> torch.Tensor:
        """`ln E exp(sqrt(nu_f) theta_f chi*_f - nu_f theta_f^2/2)` by feature: (..., F) -> same."""
        amplitudes = self.amplitudes(projections)
        scaled = projections * amplitudes
        size = scaled.abs()
        folded = size + torch.log1p(torch.exp(-2 * size)) - math.log(2)
        constant = torch.arange(self.num_features, device=scaled.device) == 0
        return torch.where(constant, scaled, folded) - amplitudes.square() / 2

    def signal_mixture(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Means (A, F) and variances (F,) of the equally likely Gaussian parts of the signal."""
        atoms = self.atoms()
        return atoms, torch.zeros_like(atoms[0])


@dataclass(frozen=True)
class GaussianFeatures(_Law):
    """`theta_f ~ N(0, 1)` independent, so that the signal has covariance diag(nu)."""

    name = "gauss"

    @property
    def symmetric(self) -> tuple[bool, ...]:
        """Which features have mean zero."""
        return (True,) * self.num_features

    def theta(self, count, generator, dtype=torch.float64):
        """`count` (an integer or a shape) draws of theta, shape (count, F)."""
        shape = (*_shape(count), self.num_features)
        return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)

    def log_evidence(self, projections: torch.Tensor) -> torch.Tensor:
        """`(nu_f chi*_f^2/(1 + nu_f) - ln(1 + nu_f))/2` by feature: (..., F) -> same."""
        nu = self.amplitudes(projections).square()
        return (projections.square() * nu / (1 + nu) - torch.log1p(nu)) / 2

    def signal_mixture(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Means (A, F) and variances (F,) of the equally likely Gaussian parts of the signal."""
        nu = torch.tensor(self.strengths)
        return torch.zeros_like(nu).unsqueeze(0), nu


@dataclass(frozen=True)
class ConstantGaussian(GaussianFeatures):
    """`theta_1 = 1`, the other features as in `GaussianFeatures`."""

    name = "gauss1"

    @property
    def symmetric(self) -> tuple[bool, ...]:
        """Which features have mean zero."""
        return (False,) + (True,) * (self.num_features - 1)

    def theta(self, count, generator, dtype=torch.float64):
        """`count` (an integer or a shape) draws of theta, shape (count, F)."""
        theta = super().theta(count, generator, dtype)
        theta[..., 0] = 1
        return theta

    def log_evidence(self, projections: torch.Tensor) -> torch.Tensor:
        """As for the parent law, with `sqrt(nu_1) chi*_1 - nu_1/2` for the constant feature."""
        evidence = super().log_evidence(projections)
        nu = self.strengths[0]
        evidence[..., 0] = nu**0.5 * projections[..., 0] - nu / 2
        return evidence

    def signal_mixture(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Means (A, F) and variances (F,) of the equally likely Gaussian parts of the signal."""
        means, variances = super().signal_mixture()
        means[0, 0], variances[0] = self.strengths[0] ** 0.5, 0.0
        return means, variances


LAWS = {law.name: law for law in (FlippingSpike, GaussianFeatures, ConstantGaussian)}


def feature_law(name: str, strengths) -> FlippingSpike | GaussianFeatures:
    """The law called "flip", "gauss" or "gauss1" with strengths nu.

    Raises ValueError for another name, no strengths, or negative ones.

    >>> feature_law("gauss", [8, 2]).num_features
    2
    """
    if name not in LAWS:
        raise ValueError(f"law={name!r}: expected one of {tuple(LAWS)}")
    return LAWS[name](tuple(float(nu) for nu in strengths))


def _shape(count) -> tuple[int, ...]:
    return (count,) if isinstance(count, int) else tuple(count)


def torch_generator(rng: np.random.Generator, device="cpu") -> torch.Generator:
    """A torch generator seeded by the next integer of a NumPy generator."""
    return torch.Generator(device).manual_seed(int(rng.integers(2**62)))


def multihead_weights(
    logits: torch.Tensor, square_norms: torch.Tensor, kind: str, norm_bias: bool = True
) -> torch.Tensor:
    """Weights `p (..., H, L)` of logits (..., H, L) for keys with `q_h = |k_h|^2/D` (..., H).

    With `z = chi - q/2` (or chi, without `norm_bias`): "softmax" normalises each head over the
    tokens, "softmax1" each head with one more in the denominator, "bsoftmax" all heads and tokens
    together. The layer's attention is `attention(p, kind)`. Raises ValueError for another kind.
    Source: specialization, setting.

    >>> multihead_weights(torch.zeros(2, 3), torch.zeros(2), "softmax1")[0]
    tensor([0.2500, 0.2500, 0.2500])
    """
    require_kind(kind)
    z = logits - square_norms.unsqueeze(-1) / 2 if norm_bias else logits
    if kind == "softmax":
        return torch.softmax(z, dim=-1)
    if kind == "softmax1":
        return torch.softmax(torch.nn.functional.pad(z, (0, 1)), dim=-1)[..., :-1]
    return torch.softmax(z.flatten(-2), dim=-1).unflatten(-1, z.shape[-2:])


def attention(weights: torch.Tensor, kind: str) -> torch.Tensor:
    """The layer's attention `a (..., L)`: the mean over heads for softmax, the sum otherwise.

    >>> attention(torch.full((2, 4), 0.25), "softmax")
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    return weights.mean(-2) if kind == "softmax" else weights.sum(-2)


def location_residual(weights: torch.Tensor, kind: str) -> torch.Tensor:
    """`u = e_eps - a`, shape (..., L), with the hidden place at index 0."""
    residual = -attention(weights, kind)
    residual[..., 0] += 1
    return residual


def location_gradient(weights: torch.Tensor, kind: str, token_gram=None) -> torch.Tensor:
    """`G = d l/d z (..., H, L)` of the location loss `|e_eps - a|^2/2`.

    `G_hl = -c p_hl (u_l - sum p u)`, c = 1/H and the sum within the head for softmax, c = 1 for the
    others, the sum over heads too for bsoftmax. With `token_gram = X X^T/D (..., L, L)` it is the
    gradient of the token loss `|X_eps - sum_l a_l X_l|^2/(2D)`. Source: specialization.P1.
    """
    residual = location_residual(weights, kind)
    if token_gram is not None:
        residual = (token_gram @ residual.unsqueeze(-1)).squeeze(-1)
    pulled = weights * residual.unsqueeze(-2)
    mean = pulled.sum(-1, keepdim=True)
    if kind == "bsoftmax":
        mean = mean.sum(-2, keepdim=True)
    gradient = weights * mean - pulled
    return gradient / weights.shape[-2] if kind == "softmax" else gradient


def uses_bias(kind: str, norm_bias: bool) -> bool:
    """Whether the gradient of `b_h = |k_h|^2/(2D)` moves the keys: not for softmax."""
    return norm_bias and kind != "softmax"


def require_dimension(dimension: int, num_features: int, heads: int, tokens: int) -> None:
    """Raise unless D >= F + H + L, below which the reduced chain has no Wishart part."""
    require_count("dimension", dimension)
    if dimension < num_features + heads + tokens:
        raise ValueError(
            f"dimension={dimension}: expected at least F + H + L = "
            f"{num_features} + {heads} + {tokens}"
        )
