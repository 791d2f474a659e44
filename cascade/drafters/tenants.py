"""What drafters keep of the texts of each tenant, and of no other."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

MAX_TENANTS = 16  # of whom something is kept: those who came last

T = TypeVar("T")


class Tenants(Generic[T]):
    """What ``new`` made for each tenant."""

    def __init__(self, new: Callable[[], T]) -> None:
        self._new = new
        self._known: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, tenant: str) -> T:
        """The tenant's own, from before if there is any."""
        if tenant not in self._known:
            self._known[tenant] = self._new()
        self._known.move_to_end(tenant)
        if len(self._known) > MAX_TENANTS:
            self._known.popitem(last=False)
        return self._known[tenant]
