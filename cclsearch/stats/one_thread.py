"""One BLAS thread while the surrogate computes: its matrices are so small that further threads only spin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import scipy.linalg  # noqa: F401  # loads its BLAS and numpy's, which the controller finds only then
from threadpoolctl import ThreadpoolController

Function = TypeVar("Function", bound=Callable[..., object])
_CONTROLLER = ThreadpoolController()


def on_one_thread(function: Function) -> Function:
    """Return the function on one BLAS thread; after it, the user's own work has its number of threads again."""
    return cast(Function, _CONTROLLER.wrap(limits=1, user_api="blas")(function))
