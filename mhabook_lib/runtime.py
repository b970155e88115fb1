"""The machine a chapter runs on: device, precision, threads and random numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Runtime(NamedTuple):
    """What a chapter needs to know about its run."""

    device: torch.device
    rng: np.random.Generator


def resolve_device(name: str = "auto") -> torch.device:
    """The device called "cpu", "cuda", or "auto": CUDA if there is one, else the CPU.

    Raises ValueError for another name, RuntimeError if CUDA is asked for and missing.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={name!r}: expected 'auto', 'cpu' or 'cuda'")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise RuntimeError("device='cuda': no CUDA device found; use device='auto' or 'cpu'")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def rng(seed: int) -> np.random.Generator:
    """A NumPy generator: the same draws on every machine.

    >>> rng(0).integers(10, size=3).tolist()
    [8, 6, 5]
    """
    return np.random.default_rng(seed)


def configure(device: str = "auto", seed: int = 0, threads: int | None = None) -> Runtime:
    """Prepare a chapter's run: float64 by default, and the device and generator to use.

    `threads` fixes the number of CPU threads of torch (None leaves it). Singular and eigenvalues
    can change in the last bits with it, so `threads=1` makes checks repeat exactly.
    Raises as `resolve_device`, and ValueError for threads < 1.

    >>> configure("cpu", seed=1).device.type
    'cpu'
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads}: expected an integer >= 1, or None")
        torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float64)
    return Runtime(resolve_device(device), rng(seed))
