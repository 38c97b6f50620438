"""A text that is far longer than the context is refused after a look at its beginning, not after minutes of tokenising:
a few of them would keep every worker from the other clients.
"""

from __future__ import annotations

from strata.errors import RequestError
from strata.serve.errors import ApiError
from strata.serve.service import Service

_LOOK_CHARACTERS = 16
"""Characters of a text that are looked at first, for each token of the context; more than any language needs."""
_CERTAIN = 2
"""How many times the context the beginning alone must hold: only its last word can be cut."""


def encode_within_context(
    service: Service, text: str, param: str, add_special_tokens: bool = True
) -> list[int]:
    """The text's tokens. Raises ApiError 400 for one that cannot fit and is too long to be counted out,
    RequestError for one that is no text, or that the model has no tokenizer for."""

    def encode(part: str) -> list[int]:
        try:
            return list(service.tokenizer.encode(part, add_special_tokens=add_special_tokens))
        except RequestError as error:
            raise RequestError(str(error), param) from error

    context = service.engine.context
    look = context.tokens * _LOOK_CHARACTERS
    if len(text) > 2 * look:
        found = len(encode(text[:look]))
        if found > _CERTAIN * context.tokens:
            raise ApiError(
                400,
                f"the prompt's first {look:,} of {len(text):,} characters alone have {found} tokens, and "
                f"{context.name} must hold the whole and at least one new token; shorten the prompt{context.or_more}",
                "context_length_exceeded",
                param,
            )
    return encode(text)
