"""Token and page ids as Core takes them: what does not fit is refused, and never wraps or is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from strata.errors import RequestError

_END = 2**32


def id_array(values: Any, what: str) -> npt.NDArray[np.uint32]:
    """`values`, one list of integers from 0 to 2**32 - 1 (a sequence, an array, a tensor in RAM), as uint32 [count].
    Raises RequestError with `what` they are and the value that is none."""
    rule = f"{what} must be integers from 0 to 2**32 - 1"
    try:
        # Without a dtype: numpy refuses what does not fit only in lists, and wraps arrays and tensors.
        array = np.asarray(values)
    except (OverflowError, ValueError, TypeError, RuntimeError) as error:
        raise RequestError(f"{rule}, in RAM: {error}") from error
    if array.ndim != 1:
        raise RequestError(f"{what} must be one list of integers, got {array.ndim} dimensions")
    if array.size and array.dtype.kind not in "iu":
        raise RequestError(f"{rule}, got {_no_integer(array)} ({array.dtype})")
    if array.size and not np.can_cast(array.dtype, np.uint32):
        outside = array[(array < 0) | (array >= _END)]
        if outside.size:
            raise RequestError(f"{rule}, got {outside[0]}")
    return np.ascontiguousarray(array, dtype=np.uint32)


def _no_integer(array: npt.NDArray[Any]) -> Any:
    """One of the values, where possible one that shows what is wrong."""
    if array.dtype.kind == "f":
        fractions = array[np.floor(array) != array]
        return fractions[0] if fractions.size else array[0]
    if array.dtype.kind == "O":
        wrong = (value for value in array if not isinstance(value, int) or not 0 <= value < _END)
        return next(wrong, array[0])
    return array[0]
