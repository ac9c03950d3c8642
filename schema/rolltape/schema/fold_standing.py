"""How each attempt stands (open, ended, dropped, abandoned) and what the proofs of its contexts amount to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rolltape.schema.fold_parts import Parts, int32_array
from rolltape.schema.fold_proof import UNKNOWN_DIFFERENCE
from rolltape.schema.fold_ranges import Bools, take_or_null
from rolltape.schema.fold_schema import ABANDONED, DROPPED, ENDED, OPEN
from rolltape.schema.fold_timeline import END


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """State of each attempt; arrays of length K. ``is_open`` and ``is_dropped`` hold of abandoned ones too."""

    state: pa.Array
    is_open: Bools
    is_dropped: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The proofs of all actions of each attempt; arrays of length K.

    ``tito_ok`` is true, false (``differs``), or null (``unproved``, or no action). ``source`` is the weakest one.
    """

    tito_ok: pa.Array
    first_difference: pa.Array
    source: pa.Array
    differs: Bools
    unproved: Bools


def standing_of(parts: Parts) -> Standing:
    """Abandoned wins over dropped, dropped over open and ended."""
    attempts, coverage = parts.attempts, parts.coverage
    dropped = coverage.dropped | attempts.dropped
    ended = np.zeros(parts.keys.num_keys, np.bool_)
    ended[parts.timeline.key[parts.timeline.kind == END]] = True
    incomplete = attempts.incomplete.copy()
    incomplete[list(coverage.missing)] = True
    is_open = ~dropped & (~ended | incomplete)
    codes = np.select([attempts.abandoned, dropped, is_open], [0, 1, 2], 3)
    state = pa.array([ABANDONED, DROPPED, OPEN, ENDED]).take(pa.array(codes))
    return Standing(state=state, is_open=is_open, is_dropped=dropped)


def verdict_of(parts: Parts) -> Verdict:
    """One verdict for each attempt."""
    proof, num_keys = parts.proof, parts.keys.num_keys
    key = parts.layout.events.key[proof.event]
    differs, unproved, acted, submitted = (np.zeros(num_keys, np.bool_) for _ in range(4))
    acted[key] = True
    differs[key[proof.differs]] = True
    unproved[key[~proof.proved & ~proof.differs]] = True
    submitted[key[proof.submitted]] = True
    located = np.flatnonzero(proof.differs & (proof.first_difference != UNKNOWN_DIFFERENCE))[::-1]
    first = np.full(num_keys, UNKNOWN_DIFFERENCE)
    first[key[located]] = proof.first_difference[located]  # the earliest action is written last
    tito_ok = pa.array(~differs, mask=~acted | (unproved & ~differs))
    names = pa.array(["unknown", "submitted", "engine"])
    source = take_or_null(names, np.select([~acted, unproved, submitted], [-1, 0, 1], 2))
    return Verdict(
        tito_ok=tito_ok,
        first_difference=int32_array(first, first < 0),
        source=source,
        differs=differs,
        unproved=unproved,
    )
