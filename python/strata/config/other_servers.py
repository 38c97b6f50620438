"""Flags that people know from vLLM and SGLang, and what stands in their place here: whoever types one is told which
flag to take, or that there is none. None of them is taken silently for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_DEVICE_MEMORY = "--device-memory sets the device tier's size, such as 20GiB"
_HOST_MEMORY = "--host-memory sets the host tier's size, such as 64GiB; 0 turns it off"
_DISK = "--disk-path and --disk-capacity place and bound the disk tier"
_RUNNING = "--max-running bounds the requests that run at once"
_BATCH = "--batch-tokens bounds the prompt tokens of a step"
_LENGTH = "--max-model-len bounds prompt and answer together"
_POLICY = "--policy chooses how waiting requests become batches"
_CACHED = 'leave it out: pages are always shared; a request with "cache_write": false leaves none behind'
_ONE_DEVICE = "there is none: a server computes on one device"
_TLS = "there is none: a proxy in front ends TLS"
_REQUEST_LINES = "--log-level warning leaves out the line a request"
_SEED = "there is none: a request's `seed` makes its answer repeatable"
_TOKENIZER = "there is none: the tokenizer is that of the model's folder"
_UNQUANTISED = "there is none: --dtype is the number format of weights and KV cache"
_ONE_MODEL = "there is none: a server serves one model as it is"
_TEXT = "there is none: thoughts stay in the answer's text"
_CALLS = "leave it out: calls that the model writes between <tool_call> tags are found; others stay text"

COUNTERPARTS: Mapping[str, str] = MappingProxyType(
    {
        "--model-path": "--model names the model",
        "--revision": "--model NAME@REVISION names the revision too",
        "--download-dir": "the variable HF_HOME says where downloads lie",
        "--hf-token": "the variable HF_TOKEN holds the token",
        "--tokenizer": _TOKENIZER,
        "--tokenizer-path": _TOKENIZER,
        "--chat-template": "there is none: the chat template is that of the model's folder",
        "--trust-remote-code": "leave it out: no code of a model is ever run",
        "--quantization": _UNQUANTISED,
        "--kv-cache-dtype": _UNQUANTISED,
        "--context-length": _LENGTH,
        "--gpu-memory-utilization": _DEVICE_MEMORY,
        "--mem-fraction-static": _DEVICE_MEMORY,
        "--kv-cache-memory-bytes": _DEVICE_MEMORY,
        "--num-gpu-blocks-override": _DEVICE_MEMORY,
        "--max-total-tokens": _DEVICE_MEMORY,
        "--swap-space": _HOST_MEMORY,
        "--kv-offloading-size": _HOST_MEMORY,
        "--enable-hierarchical-cache": f"leave it out: the tiers are on; {_HOST_MEMORY}",
        "--hicache-size": _HOST_MEMORY,
        "--hicache-ratio": _HOST_MEMORY,
        "--hicache-write-policy": "--write-policy says when pages are copied to the host",
        "--hicache-storage-backend": _DISK,
        "--hicache-storage-prefetch-policy": "--prefetch-policy says how long a request waits for its pages from disk",
        "--kv-transfer-config": f"there is none: the tiers are Strata's own; {_DISK}",
        "--enable-prefix-caching": _CACHED,
        "--no-enable-prefix-caching": _CACHED,
        "--disable-radix-cache": _CACHED,
        "--block-size": "--page-size sets the tokens in a page",
        "--max-num-seqs": _RUNNING,
        "--max-running-requests": _RUNNING,
        "--max-queued-requests": "--max-waiting bounds the requests that wait",
        "--max-num-batched-tokens": _BATCH,
        "--max-prefill-tokens": _BATCH,
        "--chunked-prefill-size": _BATCH,
        "--enable-chunked-prefill": f"leave it out: prompts are always computed in chunks; {_BATCH}",
        "--scheduling-policy": f"{_POLICY}, and a request's `priority` always counts",
        "--schedule-policy": _POLICY,
        "--tensor-parallel-size": _ONE_DEVICE,
        "--tp-size": _ONE_DEVICE,
        "--tp": _ONE_DEVICE,
        "-tp": _ONE_DEVICE,
        "--pipeline-parallel-size": _ONE_DEVICE,
        "--pp-size": _ONE_DEVICE,
        "-pp": _ONE_DEVICE,
        "--data-parallel-size": _ONE_DEVICE,
        "--dp-size": _ONE_DEVICE,
        "--dp": _ONE_DEVICE,
        "-dp": _ONE_DEVICE,
        "--enable-lora": _ONE_MODEL,
        "--speculative-config": _ONE_MODEL,
        "--speculative-algorithm": _ONE_MODEL,
        "--reasoning-parser": _TEXT,
        "--enable-auto-tool-choice": _CALLS,
        "--tool-call-parser": _CALLS,
        "--override-generation-config": "there is none: requests say how they are sampled; --generation-config none "
        "leaves the model's own values aside",
        "--sampling-defaults": "--generation-config says whose defaults hold: auto the model's, none OpenAI's",
        "--seed": _SEED,
        "--random-seed": _SEED,
        "--enable-prompt-tokens-details": "leave it out: usage always has them",
        "--enable-metrics": "leave it out: /metrics is always there",
        "--uvicorn-log-level": "--log-level sets the least severe messages that are printed",
        "--disable-log-requests": _REQUEST_LINES,
        "--no-enable-log-requests": _REQUEST_LINES,
        "--ssl-keyfile": _TLS,
        "--ssl-certfile": _TLS,
    }
)
"""By the other's flag, what to do here."""
