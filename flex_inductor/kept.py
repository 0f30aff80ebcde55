"""A cache where functools.lru_cache does not fit: values do not follow from hashable arguments alone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Values by key, at most `limit` of them. The least recently used goes first.

    Any thread may use it. None is no value.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._lock = threading.RLock()  # dropping a value may run code that uses this cache
        self._values: OrderedDict[Any, Value] = OrderedDict()  # the last used at the end

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: Hashable, value: Value) -> None:
        self.change(key, lambda _: value)

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value, made where there is none. Other threads do not wait for `make`; the first value stays."""
        found: Any = self.get(key)
        if found is None:
            made = make()
            found = self.change(key, lambda value: made if value is None else value)
        return found

    def change(self, key: Hashable, function: Callable[[Value | None], Any]) -> Any:
        """Put what `function` makes of the value, or of None, while other threads wait; returns it."""
        with self._lock:
            value = function(self._values.get(key))
            self._values.pop(key, None)
            if value is not None:
                self._values[key] = value
            if len(self._values) > self.limit:
                self._values.popitem(last=False)
            return value

    def clear(self) -> None:
        with self._lock:
            self._values.clear()

    def __len__(self) -> int:
        return len(self._values)
