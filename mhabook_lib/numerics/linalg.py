"""Linear algebra and graphs on batches."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components as _components


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
