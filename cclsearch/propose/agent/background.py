"""A call in a daemon thread: the end of the process does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Return the future of the call's result, or of its exception."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
