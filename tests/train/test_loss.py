"""Losses are sums over rows, so that parts of a batch add up to the whole."""

from __future__ import annotations

import pytest
import torch

from polyhop.errors import ConfigError
from polyhop.train.loss import binary_cross_entropy_sum, cross_entropy_sum


def test_cross_entropy_is_additive_and_skips_the_unlabelled() -> None:
    logits, y = torch.randn(9, 4), torch.tensor([0, 1, 2, 3, -1, 0, 1, 2, -1])
    whole = cross_entropy_sum(logits, y)
    assert torch.allclose(whole, cross_entropy_sum(logits[:4], y[:4]) + cross_entropy_sum(logits[4:], y[4:]))
    by_hand = -torch.log_softmax(logits, 1)[y >= 0, y[y >= 0]].sum()
    assert torch.allclose(whole, by_hand)


def test_binary_cross_entropy_by_hand() -> None:
    logits, y = torch.randn(5, 3), torch.randint(2, (5, 3)).float()
    chance = torch.sigmoid(logits)
    by_hand = -(y * chance.log() + (1 - y) * (1 - chance).log()).sum()
    assert torch.allclose(binary_cross_entropy_sum(logits, y), by_hand)


def test_small_formats_are_summed_in_float32_and_float64_stays() -> None:
    logits, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    assert cross_entropy_sum(logits.bfloat16(), y).dtype == torch.float32
    assert cross_entropy_sum(logits.double(), y).dtype == torch.float64
    assert binary_cross_entropy_sum(logits.double(), torch.ones(6, 3)).dtype == torch.float64


def test_wrong_shapes_are_explained() -> None:
    with pytest.raises(ConfigError, match="one row for each of 4 nodes"):
        cross_entropy_sum(torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ConfigError, match="5 outputs, the graph has 3 labels"):
        binary_cross_entropy_sum(torch.zeros(4, 5), torch.zeros(4, 3))
