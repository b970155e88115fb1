r"""The ensemble whose whole risk is known: heads on orthogonal coordinate blocks, Gaussian tokens.

Tokens `x_i ~ N(0, I_D)`, `i = 1..n`; `H = D/d` heads, each sees its own block of d coordinates; a
linear target `y_i = <coef, x_i> + noise` with `E coef coef^T = (B2/D) I` and noise variance
`sigma2`; queries `x ~ N(0, tau^2 I)`. Risks are mean squared errors of estimation, averaged over
tokens, noise, coefficients and queries; formulas are exact to the order 1/n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import wrightomega

from .nadaraya_watson import average_weights
from .numerics.compare import autograd_gradient
from .numerics.montecarlo import standard_error
from .numerics.roots import bisect
from .validation import require_positive


@dataclass(frozen=True)
class BlockEnsemble:
    """The problem: `budget` D, Gaussian `bandwidth` h, query scale `tau`, noise, and B2.

    Raises ValueError unless all are positive and `tau^2 < s2 (s2 + 1)/2`, `s2 = 1 + h^2`, without
    which the variance has no mean over the queries.
    """

    budget: float
    bandwidth: float
    tau: float
    sigma2: float
    b2: float = 1.0

    def __post_init__(self):
        for name in ("budget", "bandwidth", "tau", "sigma2", "b2"):
            require_positive(name, getattr(self, name))
        limit = self.s2 * (self.s2 + 1) / 2
        if self.tau**2 >= limit:
            raise ValueError(f"tau={self.tau}: expected tau^2 < s2 (s2 + 1)/2 = {limit:.4g}")

    @cached_property
    def s2(self) -> float:
        """`1 + h^2`: a head shrinks its coordinates by 1/s2."""
        return 1 + self.bandwidth**2

    @cached_property
    def query_moment(self) -> float:
        """`m2 = tau^2 / (1 - 2 tau^2 g0)`, `g0 = 1/(s2 (s2 + 1))`."""
        return self.tau**2 / (1 - 2 * self.tau**2 / (self.s2 * (self.s2 + 1)))

    @cached_property
    def kappa(self) -> float:
        """Logarithm of the variance inflation per dimension, `log E R(x)` in one dimension."""
        return (math.log(self.query_moment / self.tau**2) - math.log1p(-(self.s2**-2))) / 2

    @cached_property
    def delta(self) -> float:
        """`2/(2 + h^2) - 1/s2`: how far the squared kernel's mean is from the kernel's."""
        return 2 / (2 + self.bandwidth**2) - 1 / self.s2

    def effective_size(self, d_head, n):
        """`n exp(-kappa d)`: the keys a head of d dimensions effectively averages."""
        return n * torch.exp(-self.kappa * _double(d_head))

    def head_variance(self, d_head, n):
        r"""`v = (e^(kappa d)/n) (sigma2 + (B2/D) [D - d + d h^2/(2 + h^2) + delta^2 d m2])`."""
        d, h2 = _double(d_head), self.bandwidth**2
        spread = self.budget - d + d * h2 / (2 + h2) + self.delta**2 * d * self.query_moment
        return torch.exp(self.kappa * d) / n * (self.sigma2 + self.b2 / self.budget * spread)

    def head_covariance(self, d_head, n):
        r"""`c = (sigma2 + (B2/D) [D - 2 d + 2 d h^2/s2])/n`, of two heads."""
        d = _double(d_head)
        spread = self.budget - 2 * d + 2 * d * self.bandwidth**2 / self.s2
        return (self.sigma2 + self.b2 / self.budget * spread) / n

    def mean_readout(self, d_head, n):
        r"""Risk of the average of the heads, `bias^2 + v/H + (1 - 1/H) c`, a tensor.

        `bias^2 = B2 tau^2 s^2 - (2/n) s delta (B2/D) d m2 e^(kappa d)`, `s = d/(D s2) - 1`.
        Source: ensemble.T11.

        >>> problem = BlockEnsemble(48, 0.75, 0.5, 9.0)
        >>> problem.mean_readout(6, 512).round(decimals=4)
        tensor(0.2461, dtype=torch.float64)
        """
        d = _double(d_head)
        missing = d / (self.budget * self.s2) - 1
        shift = self.delta * self.query_moment * d * self.b2 / self.budget / n
        bias = self.b2 * self.tau**2 * missing**2
        bias = bias - 2 * missing * shift * torch.exp(self.kappa * d)
        share = d / self.budget  # 1/H
        variance = share * self.head_variance(d, n) + (1 - share) * self.head_covariance(d, n)
        return bias + variance

    def sum_variance(self, d_head, n):
        """Variance `H v + H (H - 1) c` of the plain sum of the heads."""
        num_heads = self.budget / _double(d_head)
        pairs = num_heads * (num_heads - 1)
        return num_heads * self.head_variance(d_head, n) + pairs * self.head_covariance(d_head, n)

    def sum_scale(self, d_head, n):
        """The best factor a of the sum, `(S/s2)/(S/s2^2 + Vs)`, `S = B2 tau^2`."""
        signal = self.b2 * self.tau**2
        return signal / self.s2 / (signal / self.s2**2 + self.sum_variance(d_head, n))

    def sum_readout(self, d_head, n):
        r"""Risk of the sum of the heads times its best factor, `S Vs/(Vs + S/s2^2)`.

        Source: ensemble.X1.

        >>> BlockEnsemble(48, 0.75, 0.5, 9.0).sum_readout(6, 8192).round(decimals=4)
        tensor(0.1432, dtype=torch.float64)
        """
        signal, variance = self.b2 * self.tau**2, self.sum_variance(d_head, n)
        return signal * variance / (variance + signal / self.s2**2)

    def optimal_dimension(self, n, readout: str = "mean"):
        """The real d in [1, D] with the least risk, for the "mean" or the "sum" of the heads.

        A root of the derivative, which keeps its digits where the risk itself is flat. Raises
        ValueError for another readout and if the optimum is a corner. Source: ensemble.T11.

        >>> BlockEnsemble(48, 0.75, 0.5, 9.0).optimal_dimension([512, 2048]).round(decimals=2)
        tensor([5.3800, 8.3800], dtype=torch.float64)
        """
        risks = {"mean": self.mean_readout, "sum": self.sum_variance}
        if readout not in risks:
            raise ValueError(f"readout={readout!r}: expected one of {tuple(risks)}")
        n = _double(n)
        top = min(self.budget, 700 / self.kappa)  # beyond it e^(kappa d) overflows
        return bisect(
            lambda d: autograd_gradient(lambda d: risks[readout](d, n), d),
            torch.ones_like(n),
            torch.full_like(n, top),
        )

    def wide_limit(self, n):
        r"""`optimal_dimension(n)` as D goes to infinity: `(W(e Q) - 1)/kappa`.

        `Q = [2 n B2 tau^2/s2 + sigma2 + B2 (1 + 2/s2)] / [sigma2 + B2 + 2 delta m2 B2]`.
        Source: ensemble.X4.

        >>> round(float(BlockEnsemble(48, 0.75, 0.5, 9.0).wide_limit(2048)), 4)
        8.6164
        """
        gain = 2 * np.asarray(n) * self.b2 * self.tau**2 / self.s2
        gain = gain + self.sigma2 + self.b2 * (1 + 2 / self.s2)
        cost = self.sigma2 + self.b2 * (1 + 2 * self.delta * self.query_moment)
        return (wrightomega(1 + np.log(gain / cost)) - 1) / self.kappa

    def with_budget(self, budget: float) -> BlockEnsemble:
        """The same problem with another budget."""
        return replace(self, budget=budget)


class Replicates(NamedTuple):
    """What the averaged row of weights did to tokens and queries, each (designs, queries).

    With `mean = sum_i wbar_i x_i`: `|mean|^2`, `<mean, x>`, `|x|^2` and `|wbar|^2`.
    """

    mean_sq: torch.Tensor
    inner: torch.Tensor
    query_sq: torch.Tensor
    weight_sq: torch.Tensor


def replicate(problem, d_head: int, n: int, designs: int, queries: int, rng, device="cpu"):
    """Simulate the rows of an ensemble of H = D/d heads: `Replicates`, float64.

    Fresh tokens for each of the `designs`, and `queries` queries for each. Noise and coefficients
    are not drawn: `replicate_risk` integrates them. Raises ValueError unless d divides D.

    >>> rng = np.random.default_rng(0)
    >>> out = replicate(BlockEnsemble(4, 0.75, 0.5, 9.0), 2, 50, 3, 5, rng)
    >>> out.weight_sq.shape
    torch.Size([3, 5])
    """
    budget = int(problem.budget)
    if budget % d_head:
        raise ValueError(f"d_head={d_head}: expected a divisor of the budget {budget}")
    collected = []
    for _ in range(designs):
        x = torch.from_numpy(problem.tau * rng.standard_normal((queries, budget))).to(device)
        tokens = torch.from_numpy(rng.standard_normal((n, budget))).to(device)
        blocks = (part.unflatten(-1, (-1, d_head)).movedim(-2, -3) for part in (x, tokens))
        weights = average_weights(*blocks, problem.bandwidth)
        mean = weights @ tokens
        squares = (mean.square(), mean * x, x.square(), weights.square())
        collected.append(torch.stack([part.sum(-1) for part in squares]))
    return Replicates(*torch.stack(collected, dim=1))


def replicate_risk(problem, replicates, d_head, scale=1.0, control_variate=True):
    r"""Risk of `scale` times the average of the heads, and its standard error over designs.

    Given tokens and query the mean over noise and coefficients is exact:
    `(B2/D) |scale mean - x|^2 + scale^2 sigma2 |wbar|^2`. The control variate
    `(scale d/(D s2) - 1)^2 (B2/D) (|x|^2 - D tau^2)` has mean zero and takes away the scatter of
    the leading bias. Source: ensemble.T11, ensemble.X1.
    """
    out, power = replicates, problem.b2 / problem.budget
    distance = scale**2 * out.mean_sq - 2 * scale * out.inner + out.query_sq
    risk = power * distance + scale**2 * problem.sigma2 * out.weight_sq
    if control_variate:
        missing = scale * d_head / (problem.budget * problem.s2) - 1
        risk = risk - missing**2 * power * (out.query_sq - problem.budget * problem.tau**2)
    per_design = risk.mean(-1)
    return per_design.mean(), standard_error(per_design)


def _double(value) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
