"""Which log-probs may be trusted (design §5.3): the others are stored as they are, counted, and never imputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

SENTINELS: Final[tuple[float, ...]] = (-9999.0,)
"""Values that engines write in place of a log-prob (vLLM clamps -inf to -9999); configuration may list more."""

MAX_LOG_PROB: Final = 1e-4
"""Largest log-prob that rounding explains; above it the value is no log-prob. Unit: nat."""


def trusted_log_probs(
    values: npt.NDArray[np.floating],
    valid: npt.NDArray[np.bool_] | None = None,
    sentinels: Sequence[float] = SENTINELS,
) -> npt.NDArray[np.bool_]:
    """Which of ``values`` (float32, any shape) are log-probs to compute with.

    False for NaN, ±inf, values above :data:`MAX_LOG_PROB`, sentinels, and where ``valid`` (the not-null mask, same
    shape) is false. 0.0 and -0.0 are legal.

    >>> trusted_log_probs(np.array([-0.1, 0.0, float("nan"), -9999.0, 0.5], np.float32)).tolist()
    [True, True, False, False, False]
    """
    # -inf ≤ bound holds and NaN ≤ bound does not, so one extra comparison covers all non-finite values.
    trusted: npt.NDArray[np.bool_] = (values <= np.asarray(MAX_LOG_PROB, values.dtype)) & (values > -np.inf)
    for sentinel in sentinels:
        trusted &= values != np.asarray(sentinel, values.dtype)
    if valid is not None:
        trusted &= valid
    return trusted
