"""The compiled heart of Strata."""

__all__ = ["version"]

def version() -> str:
    """Version of the compiled module, equal to that of the distribution `strata-kv`."""
