"""Strata: a hierarchical KV cache and serving engine for long-context language models."""

__all__ = ["__version__"]

__version__ = "0.1.0"
