"""The exceptions that Strata raises; every message names the thing, the value, the flag and the remedy."""


class StrataError(Exception):
    """Base of every error that Strata raises on purpose."""


class ConfigError(StrataError):
    """A setting is missing, malformed or contradicts another."""


class CapacityError(StrataError):
    """A request or a pool cannot fit into what was configured."""


class StorageError(StrataError):
    """A storage tier cannot be opened, read or written."""


class LoadFailedError(StorageError):
    """A layer that is needed will not come, or not in time (`late`): what was computed on its load is void."""

    def __init__(self, message: str, late: bool) -> None:
        super().__init__(message)
        self.late = late


class ModelError(StrataError):
    """A model folder is missing, incomplete or of an architecture that Strata does not run."""


class RequestError(StrataError):
    """A request is invalid; the client can repair it. `field` is what has to change, by the name that a request over
    HTTP has for it, where there is one such name."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
