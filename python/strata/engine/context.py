"""What bounds a prompt and its answer together, and how that is said to whoever runs into it: an error that blames the
model for what the operator's flags leave would send its reader the wrong way."""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import ConfigError

_MIB = 1 << 20


@dataclass(frozen=True)
class ContextBounds:
    """In tokens: the model's own length, what the device tier holds, and `--max-model-len`, 0 where it is not given.
    `whole_bytes` of device memory would hold all that the other two allow. Raises ConfigError for a `--max-model-len`
    beyond the model's own length."""

    model: int
    device: int
    whole_bytes: int
    chosen: int = 0

    def __post_init__(self) -> None:
        if self.chosen > self.model:
            raise ConfigError(
                f"--max-model-len {self.chosen} is more than the {self.model} tokens that the model was made for; give "
                "at most that, or leave it out for the model's own length"
            )

    @property
    def asked(self) -> int:
        """What the device tier should hold."""
        return self.chosen or self.model

    @property
    def tokens(self) -> int:
        """What holds."""
        return min(self.asked, self.device)

    @property
    def by_device(self) -> bool:
        """Whether it is the device tier that ends it."""
        return self.device < self.asked

    @property
    def name(self) -> str:
        """The bound as an error names it, e.g. `the model's context of 8192 tokens`."""
        if self.by_device:
            return f"the context of {self.device} tokens that --device-memory leaves of {self.whole_name}"
        if self.asked < self.model:
            return f"the context of {self.chosen} tokens that --max-model-len sets (the model's own: {self.model})"
        return f"the model's context of {self.model} tokens"

    @property
    def whole_name(self) -> str:
        """What the device tier should hold, in words."""
        return (
            f"the model's {self.model}"
            if self.asked == self.model
            else f"the {self.chosen} of --max-model-len"
        )

    @property
    def or_more(self) -> str:
        """What ends an error's remedy: how the operator lets more in, where that is possible."""
        if self.by_device:
            return f", or serve with {self.whole_flag}"
        return ", or serve with a larger --max-model-len" if self.asked < self.model else ""

    @property
    def whole_flag(self) -> str:
        """The flag with which the device tier bounds nothing."""
        return f"--device-memory {-(-self.whole_bytes // _MIB)}MiB"
