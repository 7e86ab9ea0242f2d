"""Fixtures of several folders."""

import os
from collections.abc import Iterator

import pytest
import torch

# Triton's kernels run on the CPU. It looks while it is imported, which many libraries do: this file comes before all.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models: more threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
