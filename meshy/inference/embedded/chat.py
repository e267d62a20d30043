"""OpenAI's chat completions on top of `/generate`."""

from __future__ import annotations

import time
import uuid
from typing import Any

from meshy.inference.embedded.protocol import RequestFactory, visible
from meshy.inference.embedded.request import LogprobOptions, Request, RequestError, SamplingParams, integer
from meshy.inference.embedded.text import Text, trim

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens")
_FIELDS = {
    "model", "messages", "max_tokens", "max_completion_tokens", "n", "seed", "logprobs", "top_logprobs", "rid",
    "chat_template_kwargs", "stream", "user", *_SAMPLING,
}  # fmt: skip


def chat_requests(body: dict[str, Any], factory: RequestFactory) -> list[Request]:
    """The n requests of one chat completion. Raises RequestError."""
    unknown = {key for key, value in body.items() if value is not None} - _FIELDS
    if unknown:
        raise RequestError(f"The embedded engine does not support the chat field {sorted(unknown)[0]!r}.")
    if body.get("stream"):
        raise RequestError("The embedded engine does not stream chat completions; use /generate with stream.")
    prompt = _prompt(body, factory.text)
    factory.check_ids(prompt)
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    if body.get("seed") is not None:
        sampling["sampling_seed"] = body["seed"]
    room = max(0, factory.limits.context_length - len(prompt))
    params = SamplingParams.parse({**sampling, "max_new_tokens": limit if limit is not None else room})
    top = integer(body.get("top_logprobs"), "top_logprobs", default=0, at_least=0)
    options = LogprobOptions(wanted=bool(body.get("logprobs")), top=top, with_text=True)
    samples = integer(body.get("n"), "n", default=1, at_least=1)
    return [factory.make(prompt, params, sample, rid=None, options=options) for sample in range(samples)]


def _prompt(body: dict[str, Any], text: Text) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty list.")
    if text.tokenizer is None or not text.tokenizer.chat_template:
        raise RequestError("The model folder has no tokenizer with a chat template; use /generate with input_ids.")
    options = body.get("chat_template_kwargs") or {}
    try:
        prompt = text.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False, **options
        )
    except Exception as error:
        raise RequestError(f"The chat template failed: {error}") from error
    return list(prompt)


def chat_answer(body: dict[str, Any], requests: list[Request], text: Text) -> dict[str, Any]:
    """The completion of finished requests."""
    prompt_tokens = len(requests[0].prompt)
    written = sum(len(request.output) for request in requests)
    first = requests[0]
    return {
        "id": uuid.uuid4().hex,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or "default",
        "choices": [_choice(index, request, text) for index, request in enumerate(requests)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + written,
            "completion_tokens": written,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        },
        "metadata": {
            "weight_version": first.version,
            "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in first.spans],
        },
    }


def _choice(index: int, request: Request, text: Text) -> dict[str, Any]:
    reason = request.finish_reason or {}
    shown = text.decode(visible(request.output, request, reason), request.params.skip_special_tokens)
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": trim(shown, reason, request.params.no_stop_trim),
            "reasoning_content": None,
        },
        "logprobs": {"content": _scored(request, text)} if request.logprob_options.wanted else None,
        "finish_reason": reason.get("type"),
        "matched_stop": reason.get("matched"),
    }


def _scored(request: Request, text: Text) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        word = text.decode([token], skip_special_tokens=False)
        return {"token": word, "bytes": list(word.encode()), "logprob": logprob}

    content = []
    for position, (token, logprob) in enumerate(zip(request.output, request.logprobs, strict=True)):
        best = request.output_top[position].pairs() if request.output_top else ()
        content.append({**entry(token, logprob), "top_logprobs": [entry(t, value) for value, t in best]})
    return content
