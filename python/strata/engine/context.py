"""What bounds a prompt and its answer together, and how that is said to whoever runs into it: an error that blames the
model for what the operator's memory leaves would send its reader the wrong way."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True)
class ContextBounds:
    """In tokens: the model's own length, and what the device tier holds. `whole_bytes` of device memory would hold all
    that the model's length allows."""

    model: int
    device: int
    whole_bytes: int

    @property
    def tokens(self) -> int:
        """What holds."""
        return min(self.model, self.device)

    @property
    def by_device(self) -> bool:
        """Whether it is the device tier that ends it."""
        return self.device < self.model

    @property
    def name(self) -> str:
        """The bound as an error names it, e.g. `the model's context of 8192 tokens`."""
        if self.by_device:
            return (
                f"the context of {self.device} tokens that --device-memory leaves of the model's {self.model}"
            )
        return f"the model's context of {self.model} tokens"

    @property
    def or_more(self) -> str:
        """What ends an error's remedy: how the operator lets more in, where that is possible."""
        return f", or serve with {self.whole_flag}" if self.by_device else ""

    @property
    def whole_flag(self) -> str:
        """The flag with which the device tier bounds nothing."""
        return f"--device-memory {-(-self.whole_bytes // _MIB)}MiB"
