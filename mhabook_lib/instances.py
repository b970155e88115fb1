"""Random tokens with random heads, and whether energies fall along their flow.

The statistics of a chapter are shares of such instances. A sign is read with a slack of a few
hundred units in the last place of the terms that cancel.
"""

from __future__ import annotations

import numpy as np
import torch

from mhabook_lib.attention import BlockHeads, Heads
from mhabook_lib.energy import energy_rate, interaction_energy
from mhabook_lib.token_flow import (
    attention_velocity,
    layer_path,
    orthogonal_heads,
    random_heads,
    sample_sphere,
)

SLACK = 1e-12


def random_instances(
    count: int, n: int, d: int, num_heads: int, kind: str, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` independent pairs: tokens (count, n, d) and heads (count, num_heads, d, d).

    `kind` as in `random_heads`, and its errors. Source: clustering, setting.

    >>> x, heads = random_instances(3, 7, 5, 2, "psd", np.random.default_rng(0))
    >>> x.shape, heads.shape
    (torch.Size([3, 7, 5]), torch.Size([3, 2, 5, 5]))
    """
    x = sample_sphere((count, n, d), rng)
    return x, random_heads((count, num_heads, d, d), rng, kind)


def orthogonal_instances(
    count: int, n: int, d: int, num_heads: int, law: str, rng: np.random.Generator
) -> tuple[torch.Tensor, BlockHeads]:
    """`count` pairs of tokens and mutually orthogonal heads of rank d / num_heads.

    Eigenvalues are N(0, 1) for `law="normal"`, |N(0, 1)| for "positive", uniform on [0.2, 1.5] for
    "bounded". Raises ValueError for another law or when num_heads does not divide d.
    Source: clustering.T2, clustering.T3.

    >>> x, heads = orthogonal_instances(3, 7, 6, 3, "bounded", np.random.default_rng(0))
    >>> bool((heads.eigenvalues >= 0.2).all()), heads.eigenvalues.shape
    (True, torch.Size([3, 3, 2]))
    """
    laws = {
        "normal": rng.standard_normal,
        "positive": lambda shape: np.abs(rng.standard_normal(shape)),
        "bounded": lambda shape: rng.uniform(0.2, 1.5, shape),
    }
    if law not in laws:
        raise ValueError(f"law={law!r}: expected one of {', '.join(laws)}")
    if d % num_heads:
        raise ValueError(f"d={d}, num_heads={num_heads}: expected heads that share d evenly")
    x = sample_sphere((count, n, d), rng)
    eigenvalues = torch.from_numpy(laws[law]((count, num_heads, d // num_heads)))
    return x, orthogonal_heads(eigenvalues, rng, d)


def flow_rates(
    x: torch.Tensor,
    heads: Heads,
    beta,
    normalization: str = "unnormalized",
    values: Heads | None = None,
    sphere: bool = True,
) -> torch.Tensor:
    """dE_h/dt along the tokens' own flow: (..., n, d) -> (..., H).

    Arguments and errors as `attention_velocity`. Source: clustering.T1, clustering.T2.

    >>> flow_rates(torch.eye(2), torch.eye(2).unsqueeze(0), 1.0)  # two orthogonal tokens attract
    tensor([0.2500])
    """
    velocity = attention_velocity(x, heads, beta, normalization, values=values, sphere=sphere)
    return energy_rate(x, velocity, heads, beta)


def total_falls(rates: torch.Tensor) -> torch.Tensor:
    """Whether the sum over the heads of `rates` (..., H) is negative beyond rounding: (...).

    >>> total_falls(torch.tensor([[1.0, -2.0], [1.0, -1.0]]))
    tensor([ True, False])
    """
    return rates.sum(-1) < -SLACK * rates.abs().sum(-1)


def head_falls(rates: torch.Tensor) -> torch.Tensor:
    """Which heads of `rates` (..., H) lose energy beyond rounding: (..., H).

    >>> head_falls(torch.tensor([[1.0, -2.0]]))
    tensor([[False,  True]])
    """
    return rates < -SLACK * rates.abs().sum(-1, keepdim=True)


def layer_energies(
    x: torch.Tensor, heads: Heads, beta, step, num_layers: int, normalization: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Total energy after 0, ..., num_layers layers, and how far each layer moved the tokens.

    Returns E (num_layers + 1, ...) and `|y_i - x_i|^2` (num_layers, ..., n). Arguments and errors
    as `layer_path`. Source: clustering.X1, clustering.X3.

    >>> energy, moved = layer_energies(torch.eye(2), torch.eye(2).unsqueeze(0), 1.0, 0.1, 4, "relu")
    >>> energy.shape, moved.shape
    (torch.Size([5]), torch.Size([4, 2]))
    """
    path = layer_path(x, heads, beta, step, num_layers, normalization)
    energy = interaction_energy(path, heads, beta).sum(-1)
    return energy, path.diff(dim=0).square().sum(-1)


def layer_falls(energy: torch.Tensor) -> torch.Tensor:
    """Which layers lower the energy (num_layers + 1, ...) beyond rounding: (num_layers, ...).

    >>> layer_falls(torch.tensor([1.0, 2.0, 1.5]))
    tensor([False,  True])
    """
    return energy.diff(dim=0) < -SLACK * energy[1:].abs()
