"""Fixtures of several adapters."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def dtype(backend: str, on_device: None) -> torch.dtype:
    return torch.float32 if backend == "cpu" else torch.float16
