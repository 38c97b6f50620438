"""Where a Mover gets its transfers and where it reports: `strata._core.TransferQueue`, as this layer knows it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class TransferSource(Protocol):
    """Transfers are known by their number. A taken one ends with `done` or `cancelled`, exactly once."""

    def take(
        self, timeout_s: float
    ) -> tuple[int, str, npt.NDArray[np.uint32], npt.NDArray[np.uint32]] | None:
        """The next (number, `load` or `backup`, source pages, destination pages); None within the limit."""
        ...

    def is_cancelled(self, transfer: int) -> bool:
        """Whether it need not be begun or gone on with."""
        ...

    def layers_ready(self, transfer: int, ready: int) -> None:
        """Layers `0..ready` of a load are whole on the device."""
        ...

    def doom(self, transfer: int, reason: str) -> None:
        """It will not end well; whoever waits for it is told now."""
        ...

    def done(
        self, transfer: int, pages_whole: int, bytes: int, busy_s: float, error: str | None = None
    ) -> None:
        """It is over, and the device has let go of its pages."""
        ...

    def cancelled(self, transfer: int, busy_s: float) -> None:
        """It was cancelled and is over, short; the device has let go of its pages."""
        ...

    def close(self, *, torn_down: bool = False) -> None:
        """Nothing more is taken. `torn_down`: nothing on the device can touch any page any more."""
        ...
