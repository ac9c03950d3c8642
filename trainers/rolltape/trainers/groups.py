"""Group completeness: a group with failed members is padded by repetition or dropped (algorithms.md §4.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from rolltape.schema.errors import ConfigError

PadRule = Literal["gt_half", "ge_half"]
PAD_RULES: Final[tuple[str, ...]] = get_args(PadRule)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Who is trained, in order: groups by number, in each its valid members in the order given, then the copies.

    Example: one group of 4 expected, members 0..3, member 1 invalid: ``member_index`` ``[0, 2, 3, 0]``,
    ``is_padding`` ``[F, F, F, T]``.
    """

    member_index: Tensor
    """``[K]`` int64 into the members given; a copy repeats the index of its source."""
    is_padding: Tensor
    """``[K]`` bool. Copies are declared on the tape and are exempt from "trained once" (D31)."""
    padded_groups: Tensor
    """int64, numbers of groups that were filled up."""
    dropped_groups: Tensor
    """int64, numbers of groups that had too few valid members."""


def complete_groups(group: Tensor, group_size: Tensor, valid: Tensor, *, pad_rule: PadRule = "gt_half") -> GroupPlan:
    """Pad or drop every group that has fewer valid members than it should.

    With v valid of G: v = G is used as it is; v > G/2 is padded to G by repeating the valid members in ascending
    order, round robin; fewer drop the group. At exactly G/2, ``ge_half`` pads and ``gt_half`` drops (D9). v = 0 always
    drops. Stale members count as not valid.

    Args:
        group: ``[M]`` int64 group numbers.
        group_size: ``[M]`` int64, G of each member's group (members that never came count too).
        valid: ``[M]`` bool.
        pad_rule: see above.

    Raises:
        ConfigError: ``pad_rule`` is unknown, a size is below 1, differs within a group, or is exceeded.
    """
    if pad_rule not in PAD_RULES:
        raise ConfigError(f"pad_rule: expected one of {', '.join(PAD_RULES)}, got {pad_rule!r}")
    members: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for index, (number, size, is_valid) in enumerate(
        zip(group.tolist(), group_size.tolist(), valid.tolist(), strict=True)
    ):
        if size < 1 or sizes.setdefault(number, size) != size:
            raise ConfigError(f"group {number}: expected one group size >= 1, got {sizes.get(number)} and {size}")
        members.setdefault(number, []).extend([index] if is_valid else [])
    chosen: list[int] = []
    padding: list[bool] = []
    padded: list[int] = []
    dropped: list[int] = []
    for number in sorted(members):
        present, size = members[number], sizes[number]
        if len(present) > size:
            raise ConfigError(f"group {number}: expected at most {size} valid members, got {len(present)}")
        if not _enough(len(present), size, pad_rule):
            dropped.append(number)
            continue
        missing = size - len(present)
        chosen += present + [present[copy % len(present)] for copy in range(missing)]
        padding += [False] * len(present) + [True] * missing
        if missing:
            padded.append(number)
    return GroupPlan(
        member_index=torch.tensor(chosen, dtype=torch.int64),
        is_padding=torch.tensor(padding, dtype=torch.bool),
        padded_groups=torch.tensor(padded, dtype=torch.int64),
        dropped_groups=torch.tensor(dropped, dtype=torch.int64),
    )


def _enough(num_valid: int, size: int, pad_rule: PadRule) -> bool:
    """Whether a group is used: never without a valid member; doubled, so that odd sizes need no rounding."""
    if num_valid == 0:
        return False
    return 2 * num_valid > size if pad_rule == "gt_half" else 2 * num_valid >= size
