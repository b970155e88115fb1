"""runtime: devices, threads and random numbers."""

import pytest
import torch

from mhabook_lib.runtime import configure, resolve_device, rng


@pytest.fixture(autouse=True)
def restore():
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == resolve_device("cpu").type == "cpu"
    with pytest.raises(RuntimeError, match="no CUDA device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == resolve_device("cuda").type == "cuda"
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(ValueError, match="device='gpu'"):
        resolve_device("gpu")


def test_configure():
    torch.set_default_dtype(torch.float32)
    first, second = configure("cpu", seed=5, threads=1), rng(5)
    assert torch.get_default_dtype() == torch.float64
    assert torch.get_num_threads() == 1
    assert first.rng.integers(1000, size=5).tolist() == second.integers(1000, size=5).tolist()
    with pytest.raises(ValueError, match="threads=0"):
        configure("cpu", threads=0)
