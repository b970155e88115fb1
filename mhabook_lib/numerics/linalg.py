"""Linear algebra and graphs on batches."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components as _components

from ..validation import require_finite


def random_orthonormal(shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Matrices (..., d, k) with orthonormal columns, uniform (Haar), float64.

    QR of a Gaussian matrix, columns signed by the diagonal of R. Raises ValueError if k > d.

    >>> q = random_orthonormal((5, 3), np.random.default_rng(0))
    >>> bool(((q.mT @ q - torch.eye(3)).abs() < 1e-12).all())
    True
    """
    if shape[-1] > shape[-2]:
        raise ValueError(f"shape={shape}: expected at most {shape[-2]} orthonormal columns")
    q, r = torch.linalg.qr(torch.from_numpy(rng.standard_normal(shape)))
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def connected_components(adjacency: torch.Tensor) -> torch.Tensor:
    """Component label of every node of a batch of undirected graphs.

    adjacency (..., n, n), boolean -> (..., n) integers 0, 1, ... counted anew in each graph, in
    order of the first node of each component. One sparse search for the whole batch.

    >>> connected_components(torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 1]]) > 0)
    tensor([0, 1, 0])
    """
    *batch, n, _ = adjacency.shape
    graphs = adjacency.reshape(-1, n, n)
    graph, row, column = (index.cpu().numpy() for index in graphs.nonzero(as_tuple=True))
    size = graphs.shape[0] * n
    entries = (np.ones(len(graph), dtype=bool), (graph * n + row, graph * n + column))
    _, labels = _components(coo_array(entries, shape=(size, size)), directed=False)
    labels = labels.reshape(-1, n)
    first = (labels[:, :, None] == labels[:, None, :]).argmax(-1)  # first node of my component
    is_first = first == np.arange(n)
    local = np.take_along_axis(is_first.cumsum(-1) - 1, first, axis=-1)
    return torch.from_numpy(local).reshape(*batch, n).to(adjacency.device)


def orthonormal_basis(matrix: torch.Tensor, name: str = "matrix") -> torch.Tensor:
    """Orthonormal bases (..., d, k) of the column spaces of `matrix (..., d, k)`, by QR.

    Raises ValueError, with the argument's `name`, for k > d, for entries that are not finite, and
    for a column space of lower dimension: a singular value below `d eps` times the largest.

    >>> orthonormal_basis(torch.tensor([[3.0], [4.0]])).abs()
    tensor([[0.6000],
            [0.8000]])
    """
    shape = tuple(matrix.shape)
    if len(shape) < 2 or shape[-1] > shape[-2] or shape[-1] == 0:
        raise ValueError(f"{name} of shape {shape}: expected (..., d, k) with 1 <= k <= d")
    require_finite(name, matrix)
    q, r = torch.linalg.qr(matrix)
    values = torch.linalg.svdvals(r)
    threshold = shape[-2] * torch.finfo(matrix.dtype).eps * values[..., 0]
    rank = (values > threshold[..., None]).sum(-1)
    if bool((rank < shape[-1]).any()):
        raise ValueError(f"{name} of rank {int(rank.min())}: expected rank {shape[-1]}")
    return q


def principal_angles(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Angles between the column spaces of two batches of matrices, ascending, in radians.

    first (..., d, k), second (..., d, l) of full rank -> (..., min(k, l)). Cosines are the singular
    values of `Q_1^T Q_2`, sines those of `Q_2 - Q_1 Q_1^T Q_2`; each angle is taken from the one
    that is small, which keeps all digits of small angles (Bjoerck and Golub). Raises ValueError for
    different d and as `orthonormal_basis`.

    >>> line, other = torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0], [1e-6]])
    >>> principal_angles(line, other)
    tensor([1.0000e-06])
    """
    if first.ndim < 2 or second.ndim < 2 or first.shape[-2] != second.shape[-2]:
        raise ValueError(
            f"first of shape {tuple(first.shape)} and second of shape {tuple(second.shape)}: "
            f"expected (..., d, k) and (..., d, l)"
        )
    if first.shape[-1] < second.shape[-1]:
        first, second = second, first
    q, p = orthonormal_basis(first, "first"), orthonormal_basis(second, "second")
    overlap = q.mT @ p
    cosines = torch.linalg.svdvals(overlap).clamp(max=1)
    sines = torch.linalg.svdvals(p - q @ overlap).flip(-1).clamp(max=1)
    return torch.where(cosines < 0.5**0.5, cosines.arccos(), sines.arcsin())
