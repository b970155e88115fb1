"""Shared instances for the clustering tests, and slow versions written as loops."""

import math

import numpy as np
import torch

from mhabook_lib.token_flow import normalize_tokens


def test_vector():
    """The arrays of the test vector: no random numbers. n = 6, d = 4, H = 2, beta = 1.5."""
    i, k = np.arange(6)[:, None], np.arange(4)[None, :]
    x = normalize_tokens(torch.from_numpy(np.sin(1 + 3 * i + 2 * k + i * k)))
    h, row, column = np.ogrid[:2, :4, :4]
    matrices = torch.from_numpy(np.cos(h + row + column + (row - column) ** 2) / 4)
    return x, matrices, 1.5


test_vector.__test__ = False


def loop_weights(x, m, beta, normalization):
    """Weights (n, n) of one head, one number at a time."""
    n = len(x)
    scores = [[float(x[i] @ m @ x[j]) for j in range(n)] for i in range(n)]
    if normalization == "relu":
        return [[max(s, 0.0) for s in row] for row in scores]
    kernel = [[math.exp(beta * s) for s in row] for row in scores]
    if normalization == "unnormalized":
        return kernel
    return [[k / sum(row) for k in row] for row in kernel]


def loop_velocity(x, matrices, beta, normalization, values=None, sphere=True):
    """The velocity (n, d), one token and one head at a time."""
    n = len(x)
    values = matrices if values is None else values
    v = torch.zeros_like(x)
    for m, value in zip(matrices, values, strict=True):
        weights = loop_weights(x, m, beta, normalization)
        for i in range(n):
            for j in range(n):
                v[i] += weights[i][j] * (value @ x[j])
    if normalization != "softmax":
        v /= n
    if sphere:
        for i in range(n):
            v[i] -= (v[i] @ x[i]) * x[i]
    return v
