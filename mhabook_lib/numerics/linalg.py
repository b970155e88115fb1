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


def psd_root(gram: torch.Tensor) -> torch.Tensor:
    """A factor R (..., n, n) with `R R^T = gram` for positive semidefinite matrices.

    Cholesky where all matrices are definite; else from eigenvalues, negative rounding set to zero.
    Raises ValueError for an eigenvalue below -1e-10 of the largest.

    >>> psd_root(torch.tensor([[4.0, 0.0], [0.0, 0.0]]))
    tensor([[0., 2.],
            [0., 0.]])
    """
    factor, info = torch.linalg.cholesky_ex(gram)
    if not bool(info.any()):
        return factor
    eigenvalues, vectors = torch.linalg.eigh(gram)
    low, high = float(eigenvalues.min()), float(eigenvalues.max())
    if low < -1e-10 * abs(high):
        raise ValueError(f"gram with eigenvalue {low:.3g}: expected a positive semidefinite matrix")
    return vectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)


def wishart_factor(
    n: int, degrees: int, rng: np.random.Generator, batch: tuple[int, ...] = ()
) -> torch.Tensor:
    """A factor F with `F F^T = Z Z^T` in law, Z an (n, degrees) array of standard normals, float64.

    (..., n, n) lower triangular when degrees >= n (Bartlett: independent chi variables with
    degrees, degrees - 1, ... degrees of freedom on the diagonal, normals below), whatever the
    number of degrees; else Z itself. Raises ValueError unless n >= 1 and degrees >= 1.

    >>> wishart_factor(3, 10**6, np.random.default_rng(0)).diagonal().round(decimals=-1)
    tensor([1000., 1000., 1000.], dtype=torch.float64)
    """
    if n < 1 or degrees < 1:
        raise ValueError(f"n={n}, degrees={degrees}: expected integers >= 1")
    if degrees < n:
        return torch.from_numpy(rng.standard_normal((*batch, n, degrees)))
    factor = np.tril(rng.standard_normal((*batch, n, n)), -1)
    diagonal = np.arange(n)
    factor[..., diagonal, diagonal] = np.sqrt(rng.chisquare(degrees - diagonal, (*batch, n)))
    return torch.from_numpy(factor)


def lanczos_quadrature(
    matvec, start: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes and weights (..., steps) of a quadratic form: `v^T f(G) v = |v|^2 sum_k w_k f(x_k)`.

    `matvec` maps (..., n) to G times it, G symmetric; start (..., n) holds the vectors v. `steps`
    products with G and full reorthogonalisation; exact for polynomials f of degree 2 steps - 1,
    up to rounding. Fewer nodes come back when the Krylov space is exhausted. Raises ValueError
    for steps < 1 and a start vector that is zero.

    >>> diagonal = torch.tensor([1.0, 2.0, 4.0])
    >>> x, w = lanczos_quadrature(lambda v: diagonal * v, torch.ones(3), 3)
    >>> (w * x.sqrt()).sum() * 3 - diagonal.sqrt().sum() < 1e-5
    tensor(True)
    """
    norm = torch.linalg.vector_norm(start, dim=-1, keepdim=True)
    if steps < 1 or bool((norm == 0).any()):
        raise ValueError(
            f"steps={steps}: expected an integer >= 1 and start vectors that are not 0"
        )
    basis, diagonal, beside = [start / norm], [], []
    for _ in range(min(steps, start.shape[-1])):
        new = matvec(basis[-1])
        diagonal.append((new * basis[-1]).sum(-1))
        known = torch.stack(basis, dim=-1)
        for _ in range(2):  # twice is enough
            new = new - (known @ (known.mT @ new.unsqueeze(-1))).squeeze(-1)
        length = torch.linalg.vector_norm(new, dim=-1, keepdim=True)
        if bool((length <= 1e-13 * diagonal[0].abs().unsqueeze(-1)).any()):
            break
        beside.append(length.squeeze(-1))
        basis.append(new / length)
    beside = beside[: len(diagonal) - 1]
    jacobi = torch.diag_embed(torch.stack(diagonal, dim=-1))
    if beside:
        upper = torch.diag_embed(torch.stack(beside, dim=-1), offset=1)
        jacobi = jacobi + upper + upper.mT
    nodes, vectors = torch.linalg.eigh(jacobi)
    return nodes, vectors[..., 0, :].square()
