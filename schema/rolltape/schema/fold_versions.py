"""Which policy versions sampled an attempt's tokens, of which distribution its log-probs are, and what that forbids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rolltape.schema.fold_inputs import Keys, KindRows
from rolltape.schema.fold_layout import Layout
from rolltape.schema.fold_ranges import Bools, Ints, field_of, ints_of, reduce_by, single, take_or_null
from rolltape.schema.fold_schema import UNKNOWN_VERSION
from rolltape.schema.fold_tokens import Sampled, VersionRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A value that all sampled tokens of an attempt should share; arrays of length K.

    ``value`` is null where it is unknown for some token (``unknown``) or not one and the same (``mixed``).
    """

    value: pa.Array
    unknown: Bools
    mixed: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions of each attempt; arrays of length K. ``oldest`` and ``newest`` are -1 where no version is known."""

    oldest: Ints
    newest: Ints
    unknown: Bools
    aborted: Bools
    policy: Shared


def shared_value(values: pa.Array, key: Ints, num_keys: int) -> Shared:
    """The one value of each attempt; ``values`` and ``key`` (ascending) run over events or runs with sampled tokens."""
    encoded = values.dictionary_encode()
    codes = ints_of(encoded.indices)
    low = reduce_by(np.minimum, key, codes, num_keys, -2)
    high = reduce_by(np.maximum, key, codes, num_keys, -2)
    mixed = (low != high) & (high >= 0) & (low >= 0)
    known = (low == high) & (low >= 0)
    value = take_or_null(encoded.dictionary, np.where(known, low, -1))
    # A null beside two different values is both unknown and mixed.
    if ((low == -1) & (high > 0)).any():
        named = codes >= 0
        mixed |= _differs(codes[named], key[named], num_keys)
    return Shared(value=value, unknown=low == -1, mixed=mixed)


def _differs(codes: Ints, key: Ints, num_keys: int) -> Bools:
    low, high = (reduce_by(ufunc, key, codes, num_keys, -2) for ufunc in (np.minimum, np.maximum))
    differs: Bools = low != high
    return differs


def judge_versions(
    layout: Layout, runs: VersionRuns, flat: Ints, sampled: Sampled, keys: Keys, aborted: pa.Table | None
) -> Versions:
    """Oldest and newest version of the sampled tokens of each attempt, and which have tokens of unknown ones."""
    num_keys = keys.num_keys
    run_key = layout.events.key[runs.action]
    covers = _covers(runs, sampled)
    if covers:
        oldest = reduce_by(np.minimum, run_key, runs.version, num_keys, UNKNOWN_VERSION)
        newest = reduce_by(np.maximum, run_key, runs.version, num_keys, UNKNOWN_VERSION)
        unknown = np.zeros(num_keys, np.bool_)
    else:
        oldest, newest, unknown = _by_token(layout, flat, sampled, num_keys)
    return Versions(
        oldest=oldest,
        newest=newest,
        unknown=unknown,
        aborted=_uses_aborted(runs, run_key, keys, aborted),
        policy=shared_value(runs.policy, run_key, num_keys),
    )


def _covers(runs: VersionRuns, sampled: Sampled) -> bool:
    """Whether the runs give every action token a known version, each exactly once: then runs say all that tokens do."""
    if not sampled.whole or (runs.version < 0).any() or int(runs.length.sum()) != int(sampled.counts.sum()):
        return False
    return bool((runs.start[1:] >= runs.start[:-1] + runs.length[:-1]).all())


def _by_token(layout: Layout, flat: Ints, sampled: Sampled, num_keys: int) -> tuple[Ints, Ints, Bools]:
    key = np.repeat(layout.events.key, layout.length)
    known = sampled.mask & (flat >= 0)
    oldest = reduce_by(np.minimum, key[known], flat[known], num_keys, UNKNOWN_VERSION)
    newest = reduce_by(np.maximum, key[known], flat[known], num_keys, UNKNOWN_VERSION)
    unknown = np.zeros(num_keys, np.bool_)
    unknown[key[sampled.mask & (flat < 0)]] = True
    return oldest, newest, unknown


def _uses_aborted(runs: VersionRuns, run_key: Ints, keys: Keys, aborted: pa.Table | None) -> Bools:
    """Attempts with tokens of a version that ``weights_aborted`` names (run, policy, run epoch, number)."""
    used = np.zeros(keys.num_keys, np.bool_)
    if aborted is None or not aborted.num_rows or not len(runs.version):
        return used
    struct = single(aborted["weights_aborted"])
    names = [field_of(struct, name) for name in ("policy_id", "version")]
    epochs = ints_of(field_of(struct, "policy_run_epoch"))
    columns = (single(aborted["run_id"]), names[0], epochs, ints_of(names[1]))
    refused = set(zip(*(column.tolist() for column in columns), strict=True))
    used_by = (keys.run_ids.take(pa.array(run_key)), runs.policy, runs.epoch, runs.version)
    for at, version in enumerate(zip(*(column.tolist() for column in used_by), strict=True)):
        if version in refused:
            used[run_key[at]] = True
    return used


def sampling_values(layout: Layout, actions: KindRows, sampled: Sampled, name: str, num_keys: int) -> Shared:
    """A field of the sampling configuration that all actions with sampled tokens should share."""
    events = np.flatnonzero(sampled.counts > 0)
    values = field_of(actions.field("sampling"), name)
    return shared_value(values.take(pa.array(layout.events.row[events])), layout.events.key[events], num_keys)
