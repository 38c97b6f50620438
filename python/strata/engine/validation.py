"""What a request may ask for. Everything that can never be answered is refused before it is queued."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from strata.engine.api import (
    LEAST_REPETITION,
    LONGEST_SALT,
    LONGEST_STOP,
    MOST_BIASES,
    MOST_LOGPROBS,
    MOST_PROMPT_LOGPROBS,
    MOST_REPETITION,
    MOST_STOPS,
    GenerationRequest,
    SamplingParams,
)
from strata.engine.context import ContextBounds
from strata.errors import RequestError

_HIGHEST_PRIORITY = 2**31 - 1
_MOST_BIAS = 100.0
_MOST_PENALTY = 2.0


def checked_prompt(
    request: GenerationRequest, vocabulary: int, context: ContextBounds
) -> npt.NDArray[np.uint32]:
    """The prompt as Core takes it. Raises RequestError for what can never be answered."""
    sampling = request.sampling
    prompt = np.asarray(request.prompt_token_ids)
    if not len(prompt):
        raise RequestError("the prompt is empty: send at least one token", "prompt")
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise RequestError("the prompt must be a list of token ids, all of them integers", "prompt")
    outside = (prompt < 0) | (prompt >= vocabulary)
    if outside.any():
        raise RequestError(
            f"token id {prompt[outside][0]} is outside the model's vocabulary of {vocabulary}", "prompt"
        )
    if not isinstance(request.priority, int) or abs(request.priority) > _HIGHEST_PRIORITY:
        raise RequestError(
            f"priority must be a whole number from -{_HIGHEST_PRIORITY} to {_HIGHEST_PRIORITY}, "
            f"got {request.priority!r}",
            "priority",
        )
    if len(request.cache_salt) > LONGEST_SALT:
        raise RequestError(
            f"cache_salt has {len(request.cache_salt)} characters, more than {LONGEST_SALT}: send a shorter one, such "
            "as a hash of it",
            "cache_salt",
        )
    if any("\ud800" <= character <= "\udfff" for character in request.cache_salt):
        raise RequestError(
            "cache_salt holds half a surrogate pair: it must be valid Unicode text", "cache_salt"
        )
    check_sampling(sampling, vocabulary)
    scores = 0 if sampling.prompt_logprobs is None else len(prompt) * (1 + sampling.prompt_logprobs)
    if scores > MOST_PROMPT_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs {sampling.prompt_logprobs} of {len(prompt)} tokens are more than the "
            f"{MOST_PROMPT_LOGPROBS} log probabilities that one prompt may have: lower it, or shorten the prompt",
            "prompt_logprobs",
        )
    if len(prompt) + sampling.max_tokens > context.tokens + 1:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}; together at most "
            f"{context.tokens + 1} fit into {context.name}: shorten either{context.or_more}",
            "max_tokens",
        )
    return prompt.astype(np.uint32)


def check_sampling(sampling: SamplingParams, vocabulary: int) -> None:
    """Raises RequestError for parameters that mean nothing, with the name and the value."""
    if not isinstance(sampling.max_tokens, int) or sampling.max_tokens < 1:
        raise RequestError(
            f"max_tokens must be a whole number of at least 1, got {sampling.max_tokens!r}", "max_tokens"
        )
    if not all(isinstance(stop, str) for stop in sampling.stop):
        raise RequestError(f"stop must be a list of texts, got {sampling.stop!r}", "stop")
    if len(sampling.stop) > MOST_STOPS or max(map(len, sampling.stop), default=0) > LONGEST_STOP:
        raise RequestError(
            f"stop may hold {MOST_STOPS} texts of {LONGEST_STOP} characters; give fewer or shorter ones",
            "stop",
        )
    if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0):
        raise RequestError(
            "temperature and top_k must be at least 0 and top_p between 0 and 1, "
            f"got {sampling.temperature}, {sampling.top_k}, {sampling.top_p}"
        )
    if not 0 <= sampling.min_p <= 1:
        raise RequestError(f"min_p must be between 0 and 1, got {sampling.min_p}", "min_p")
    if not LEAST_REPETITION <= sampling.repetition_penalty <= MOST_REPETITION:
        raise RequestError(
            f"repetition_penalty must be between {LEAST_REPETITION} and {MOST_REPETITION:g} (1 changes nothing), got "
            f"{sampling.repetition_penalty}",
            "repetition_penalty",
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not abs(value) <= _MOST_PENALTY:
            raise RequestError(
                f"{name} must be between -{_MOST_PENALTY} and {_MOST_PENALTY}, got {value}", name
            )
    if len(sampling.logit_bias) > MOST_BIASES:
        raise RequestError(
            f"logit_bias names {len(sampling.logit_bias)} tokens; at most {MOST_BIASES} can be given",
            "logit_bias",
        )
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"logit_bias names token {token}, outside the vocabulary of {vocabulary}", "logit_bias"
            )
        if not abs(bias) <= _MOST_BIAS:
            raise RequestError(
                f"logit_bias of token {token} must be between -{_MOST_BIAS:g} and {_MOST_BIAS:g}, got {bias}",
                "logit_bias",
            )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and not 0 <= count <= MOST_LOGPROBS:
            raise RequestError(f"{name} must be between 0 and {MOST_LOGPROBS}, got {count}", name)
