"""The examples in the docstrings of the library."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import mhabook_lib

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(mhabook_lib.__path__, "mhabook_lib.")
    if not module.name.startswith(("mhabook_lib.book", "mhabook_lib.chapters"))
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    previous, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    try:
        assert doctest.testmod(importlib.import_module(name)).failed == 0
    finally:
        torch.set_default_dtype(previous)
        torch.set_num_threads(threads)
