"""Which physical experts a rank holds, and which logical expert each of them is.

Why: with redundant experts a logical expert has several copies, maybe several on one rank, and a load has to fill
all of them; a rebalancing moves experts between slots, and later loads have to follow it. Both questions are
answered here and nowhere else.

    physical experts   0 .. num_experts-1 | replicas       rank r holds [r E, (r+1) E), its slots 0 .. E-1
    logical expert     physical % num_experts, until `moved`

Use:

    placement = Placement(num_experts=6, num_redundant=2, ep_size=2, ep_rank=1)      # slots hold physical 4 5 6 7
    placement.logical_of_slot       # (4, 5, 0, 1)
    placement.slots_of(0)           # (2,)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from weightsync.errors import shown


class Placement:
    """Experts of one layer over the ranks of one group; immutable.

    Args:
        num_experts: Logical experts.
        num_redundant: Replicas beyond them.
        ep_size: Ranks.
        ep_rank: This rank.

    Attributes:
        num_experts: Logical experts.
        num_physical: Logical experts and replicas.
        num_slots: Physical experts per rank.
        first_physical: Physical id of slot 0.
        logical_of_slot: Logical expert of each local slot.

    Raises:
        ValueError: Counts that do not fit.
    """

    def __init__(self, num_experts: int, num_redundant: int = 0, ep_size: int = 1, ep_rank: int = 0) -> None:
        num_physical = num_experts + num_redundant
        if num_experts < 1 or num_redundant < 0 or not 0 <= ep_rank < ep_size:
            raise ValueError(
                f"placement needs num_experts >= 1, num_redundant >= 0 and 0 <= ep_rank < ep_size, got {num_experts}, "
                f"{num_redundant}, rank {ep_rank} of {ep_size}"
            )
        if num_physical % ep_size:
            raise ValueError(
                f"{num_experts} experts and {num_redundant} replicas cannot be spread evenly over {ep_size} ranks"
            )
        self.num_experts = num_experts
        self.num_redundant = num_redundant
        self.num_physical = num_physical
        self.ep_size = ep_size
        self.ep_rank = ep_rank
        self.num_slots = num_physical // ep_size
        self.first_physical = ep_rank * self.num_slots
        self._place([physical % num_experts for physical in range(num_physical)])

    def moved(self, physical_to_logical: Sequence[int]) -> Placement:
        """The same ranks with experts elsewhere.

        Args:
            physical_to_logical: Logical expert of each physical expert.

        Raises:
            ValueError: Wrong length, an unknown expert, or an expert without a slot anywhere.
        """
        experts = [int(expert) for expert in physical_to_logical]
        missing = sorted(set(range(self.num_experts)) - set(experts))
        if len(experts) != self.num_physical or missing or not all(0 <= e < self.num_experts for e in experts):
            raise ValueError(
                f"placement must name {self.num_physical} physical experts, each one of {self.num_experts} logical "
                "ones and "
                f"every one of them at least once; got {len(experts)}, without a slot: "
                f"{shown([str(e) for e in missing])}"
            )
        placement = Placement(self.num_experts, self.num_redundant, self.ep_size, self.ep_rank)
        placement._place(experts)
        return placement

    def slots_of(self, expert: int) -> tuple[int, ...]:
        """Local slots of a logical expert; empty if it is on other ranks.

        Raises:
            ValueError: There is no such expert.
        """
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"expert {expert} does not exist: there are {self.num_experts} logical experts")
        return _slots_by_expert(self.logical_of_slot).get(expert, ())

    def _place(self, physical_to_logical: Sequence[int]) -> None:
        local = physical_to_logical[self.first_physical : self.first_physical + self.num_slots]
        self.logical_of_slot = tuple(local)


@functools.lru_cache(maxsize=256)
def _slots_by_expert(logical_of_slot: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Local slots of each expert; kept here, once for all layers that are placed alike, and not on every layer."""
    slots: dict[int, list[int]] = {}
    for slot, expert in enumerate(logical_of_slot):
        slots.setdefault(expert, []).append(slot)
    return {expert: tuple(found) for expert, found in slots.items()}
