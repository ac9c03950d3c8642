"""Which log-probs may be computed with (design §5.3)."""

from __future__ import annotations

import numpy as np
import pytest

from rolltape.schema.trust import MAX_LOG_PROB, trusted_log_probs


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each_kind_of_value(dtype: type[np.floating]) -> None:
    cases = [
        (-0.5, True),
        (0.0, True),
        (-0.0, True),
        (-1e30, True),
        (MAX_LOG_PROB, True),
        (2e-4, False),
        (float("inf"), False),
        (float("-inf"), False),
        (float("nan"), False),
        (-9999.0, False),
        (-100.0, True),
    ]
    values, expected = zip(*cases, strict=True)
    assert trusted_log_probs(np.array(values, dtype)).tolist() == list(expected)


def test_nulls_are_not_trusted_whatever_lies_under_them() -> None:
    values = np.zeros(3, np.float32)
    assert trusted_log_probs(values, np.array([True, False, True])).tolist() == [True, False, True]


def test_sentinels_come_from_configuration() -> None:
    values = np.array([-9999.0, -100.0], np.float32)
    assert trusted_log_probs(values, sentinels=(-100.0,)).tolist() == [True, False]
    assert trusted_log_probs(values, sentinels=()).tolist() == [True, True]


def test_the_values_are_left_alone() -> None:
    values = np.array([float("nan"), 1.0], np.float32)
    before = values.tobytes()
    trusted_log_probs(values, np.array([True, True]))
    assert values.tobytes() == before
    assert trusted_log_probs(np.empty(0, np.float32)).tolist() == []
