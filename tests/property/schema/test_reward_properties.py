"""Scalarisation: the same components, in any order, give the same bits; storage changes nothing."""

from __future__ import annotations

import struct
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.schema.build import build_batch
from rolltape.schema.layout import column_of
from rolltape.schema.reward import RewardComponent, scalarise
from rolltape.schema.stream import decode, encode

VALUES = st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0, 0.1, 1 / 3])
COMPONENTS = st.lists(
    st.builds(
        RewardComponent,
        name=st.sampled_from("abcdef"),
        source=st.sampled_from(["rule", "orm", "grm", "penalty"]),
        value=VALUES | st.none(),
        weight=st.floats(0.0, 10.0),
        required=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda component: (component.name, component.source),
)
UNHURRIED = settings(deadline=None)


def bits(scalar: float | None) -> bytes | None:
    return None if scalar is None else struct.pack("<d", scalar)


@given(COMPONENTS, st.randoms())
@UNHURRIED
def test_the_order_of_components_changes_no_bit(components: list[RewardComponent], random: Random) -> None:
    shuffled = list(components)
    random.shuffle(shuffled)
    one, other = scalarise(components), scalarise(shuffled)
    assert bits(one.scalar) == bits(other.scalar)
    assert (one.state, one.flags) == (other.state, other.flags)


@given(COMPONENTS)
@UNHURRIED
def test_a_stored_reward_is_computed_again_bit_for_bit(components: list[RewardComponent]) -> None:
    result = scalarise(components)
    columns = {
        "components": [[component.to_row() for component in components]],
        "scalar": [result.scalar],
        "state": [result.state],
    }
    stored = decode(encode(build_batch("reward_assigned", columns).batch))
    rows = column_of(stored, "components")[0].as_py() or []
    again = scalarise(RewardComponent.from_row(row) for row in rows)
    assert bits(again.scalar) == bits(column_of(stored, "scalar")[0].as_py())
    assert again == result


@given(COMPONENTS)
@UNHURRIED
def test_a_scalar_exists_if_and_only_if_it_is_earned(components: list[RewardComponent]) -> None:
    result = scalarise(components)
    assert (result.scalar is not None) == (result.state == "earned")
    if any(component.required and component.value is None for component in components):
        assert result.state == "invalid"
