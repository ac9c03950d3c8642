"""Why an attempt may not be trained, as far as the tape alone can say."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from rolltape.schema.fold_ranges import Bools, exclusive_cumsum, list_array


def reason_lists(found: Mapping[str, Bools]) -> pa.Array:
    """For each attempt the sorted names of the reasons that hold for it.

    >>> reason_lists({"open": np.array([True, False]), "aborted": np.array([True, False])}).to_pylist()
    [['aborted', 'open'], []]
    """
    names = sorted(found)
    matrix = np.stack([found[name] for name in names], axis=1)
    _, columns = np.nonzero(matrix)
    values = pa.array(names, pa.string()).take(pa.array(columns, pa.int64()))
    return list_array(exclusive_cumsum(matrix.sum(axis=1)), values)
