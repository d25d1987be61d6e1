"""What the classes of a model's objects define: methods and class attributes, which no walk over the objects sees.

A loader or hook may be patched on its class between two pushes, or read a class attribute; then what was planned or
worked out before is out of date.

    facts = ClassFacts(type(value) for value in objects)
    facts.hold()          # False once an attribute of one of these classes, or of their bases, was set anew

Compared by identity, and kept alive for that, so that no other object can take an identity. Classes of torch, of the
standard library and of this package are left out. What changes within an attribute (an item of a list) is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

# Packages whose classes, and objects of them, are not the model's.
FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "weightsync"}


class ClassFacts:
    """Identities of all attributes of some classes and of their bases.

    Args:
        kinds: The classes.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        bases = dict.fromkeys(base for kind in dict.fromkeys(kinds) for base in kind.__mro__)
        self._classes = [base for base in bases if base.__module__.partition(".")[0] not in FOREIGN]
        self._kept = [list(vars(cls).values()) for cls in self._classes]
        self._identities = self._now()

    def _now(self) -> list[list[int]]:
        return [list(map(id, vars(cls).values())) for cls in self._classes]

    def hold(self) -> bool:
        """Whether all of them are what they were."""
        return self._now() == self._identities
