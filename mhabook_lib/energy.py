"""Energies of the attention flow, their derivatives, and the entropy production of its rows.

`E_h(X) = (1/(2 beta n^2)) sum_ij exp(beta s^h_ij)`, `E = sum_h E_h`. The derivatives hold for any
score matrices, symmetric or not, and along any velocity.
"""

from __future__ import annotations

import torch

from .attention import Heads, as_heads, attention_scores, over_trailing
from .validation import require_beta, require_same_shape


def interaction_energy(x: torch.Tensor, heads: Heads, beta) -> torch.Tensor:
    """Energy of each head, `E_h = (1/(2 beta n^2)) sum_ij exp(beta s^h_ij)`.

    x (..., n, d) -> (..., H). Raises ValueError on bad shapes or beta <= 0.
    Source: clustering, setting.

    >>> interaction_energy(torch.eye(2), torch.zeros(1, 2, 2), 2.0)
    tensor([0.2500])
    """
    scores = attention_scores(x, heads)
    require_beta(beta, scores.shape[:-3])
    kernel_sum = torch.exp(over_trailing(beta, x, 3) * scores).sum((-2, -1))
    return kernel_sum / (2 * over_trailing(beta, x, 1) * x.shape[-2] ** 2)


def relu_energy(x: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Energy of flow R per head, `(1/(4 n^2)) sum_ij max(s^h_ij, 0)^2`: (..., n, d) -> (..., H).

    Flow R with symmetric, value-aligned heads is its gradient flow. Source: clustering.T1.

    >>> relu_energy(torch.eye(2), torch.eye(2).unsqueeze(0))
    tensor([0.1250])
    """
    scores = attention_scores(x, heads)
    return (scores.clamp(min=0) ** 2).sum((-2, -1)) / (4 * x.shape[-2] ** 2)


def energy_gradient(x: torch.Tensor, heads: Heads, beta) -> torch.Tensor:
    """Gradient of each head's energy by each token, for any M_h.

    `grad_{x_i} E_h = (1/2n^2) sum_j [exp(beta s_ij) M_h + exp(beta s_ji) M_h^T] x_j`;
    x (..., n, d) -> (..., H, n, d). For symmetric M_h it is `f^h_i / n^2`. Raises as
    `interaction_energy`. Source: clustering.P1.

    >>> energy_gradient(torch.eye(2), torch.eye(2).unsqueeze(0), 1.0)[0, 0]
    tensor([0.6796, 0.2500])
    """
    kernel = _kernel(x, heads, beta)
    heads = as_heads(heads)
    gradient = heads.outputs(kernel, x) + heads.transposed().outputs(kernel.mT, x)
    return gradient / (2 * x.shape[-2] ** 2)


def energy_hessian(x: torch.Tensor, heads: Heads, beta) -> torch.Tensor:
    """Hessian of the total energy by the whole token array, for symmetric heads.

    With `w = exp(beta s^h)` and `y_j = M_h x_j`, the block (i, k) of n^2 times the Hessian is
    `sum_h w_ik (M_h + beta y_k y_i^T) + delta_ik beta sum_j w_ij y_j y_j^T`.
    x (..., n, d) -> (..., n d, n d). Raises as `interaction_energy`, and ValueError for
    non-symmetric heads. Source: clustering.X3.

    >>> energy_hessian(torch.ones(1, 1), torch.ones(1, 1, 1), 1.0) / torch.e  # E = exp(x^2) / 2
    tensor([[3.]])
    """
    n, d = x.shape[-2:]
    kernel = _kernel(x, heads, beta)
    matrices = as_heads(heads).dense(d)
    if not bool(torch.allclose(matrices, matrices.mT, rtol=0, atol=1e-12)):
        raise ValueError("heads: expected symmetric score matrices (tolerance 1e-12)")
    y = x.unsqueeze(-3) @ matrices  # (..., H, n, d)
    beta_kernel = over_trailing(beta, x, 3) * kernel
    matrices = matrices.expand((*y.shape[:-2], d, d))
    blocks = torch.einsum("...hik,...hab->...iakb", kernel, matrices)
    outer = torch.einsum("...hka,...hib->...hiakb", y, y)
    blocks = blocks + (beta_kernel[..., :, None, :, None] * outer).sum(-5)
    own = (y.mT.unsqueeze(-3) @ (beta_kernel.unsqueeze(-1) * y.unsqueeze(-3))).sum(-4)
    blocks.diagonal(dim1=-4, dim2=-2).add_(own.movedim(-3, -1))
    return blocks.flatten(-2).flatten(-3, -2) / n**2


def score_rates(x: torch.Tensor, velocity: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Time derivative of the scores, `s'_ij = <x_i', M_h x_j> + <x_i, M_h x_j'>`.

    x, velocity (..., n, d) -> (..., H, n, n). Raises ValueError on shape mismatch.
    Source: clustering.T8.

    >>> score_rates(torch.eye(2), torch.eye(2), torch.eye(2).unsqueeze(0))
    tensor([[[2., 0.],
             [0., 2.]]])
    """
    require_same_shape("velocity", velocity, "x", x)
    heads = as_heads(heads)
    heads.check(x)
    return heads.scores(velocity, x) + heads.scores(x, velocity)


def energy_rate(x: torch.Tensor, velocity: torch.Tensor, heads: Heads, beta) -> torch.Tensor:
    """Rate of each head's energy along any velocity, `dE_h/dt = sum_i <grad_{x_i} E_h, x_i'>`.

    Computed as `(1/2n^2) sum_ij exp(beta s_ij) s'_ij`; x, velocity (..., n, d) -> (..., H).
    Raises as `interaction_energy` and `score_rates`. Source: clustering.T1.

    >>> energy_rate(torch.eye(2), torch.eye(2), torch.eye(2).unsqueeze(0), 1.0)
    tensor([1.3591])
    """
    kernel = _kernel(x, heads, beta)
    return (kernel * score_rates(x, velocity, heads)).sum((-2, -1)) / (2 * x.shape[-2] ** 2)


def attention_entropy_rate(
    x: torch.Tensor, velocity: torch.Tensor, heads: Heads, beta
) -> torch.Tensor:
    """Entropy production of each softmax row, for any heads and any velocity.

    `dS^h_i/dt = -beta^2 Cov_{j ~ A^h_i}(s_ij, s'_ij)`; x, velocity (..., n, d) -> (..., H, n).
    Raises as `interaction_energy` and `score_rates`. Source: clustering.T8.

    >>> attention_entropy_rate(torch.eye(2), torch.eye(2), torch.eye(2).unsqueeze(0), 1.0)
    tensor([[-0.3932, -0.3932]])
    """
    scores = attention_scores(x, heads)
    require_beta(beta, scores.shape[:-3])
    beta = over_trailing(beta, x, 3)
    pattern = torch.softmax(beta * scores, dim=-1)
    rates = score_rates(x, velocity, heads)
    centered = scores - (pattern * scores).sum(-1, keepdim=True)
    return -(beta.squeeze(-1) ** 2) * (pattern * centered * rates).sum(-1)


def _kernel(x, heads, beta):
    scores = attention_scores(x, heads)
    require_beta(beta, scores.shape[:-3])
    return torch.exp(over_trailing(beta, x, 3) * scores)
