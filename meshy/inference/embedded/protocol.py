"""SGLang's `/generate`: its JSON to requests, and requests to its JSON."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from meshy.inference.embedded.request import LogprobOptions, Request, RequestError, SamplingParams, Scored, integer
from meshy.inference.embedded.sampler import derive_seed
from meshy.inference.embedded.text import Text, trim

_FIELDS = {
    "text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "token_ids_logprob", "return_text_in_logprobs", "stream",
}  # fmt: skip
_HARMLESS = {"log_metrics", "background", "priority", "extra_key", "conversation_id", "no_logs", "model"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model allows."""

    vocab_size: int
    context_length: int
    end_tokens: frozenset[int]


class RequestFactory:
    """Makes validated requests; every refusal is a RequestError whose message goes to the client.

    `random_seed` makes unseeded requests repeatable in their order of arrival; None leaves them random.
    """

    def __init__(self, text: Text, limits: Limits, random_seed: int | None = None) -> None:
        self.text = text
        self.limits = limits
        self._next_seed: Callable[[], int] = lambda: secrets.randbits(63)
        if random_seed is not None:
            numbers = iter(range(2**62))
            self._next_seed = lambda: derive_seed(random_seed, next(numbers) + 1)

    def generate(self, body: dict[str, Any]) -> tuple[list[Request], bool]:
        """The requests of one `/generate` call in the order of the answer, and whether that is a list."""
        unknown = {key for key, value in body.items() if value is not None} - _FIELDS - _HARMLESS
        if unknown:
            raise RequestError(f"The embedded engine does not support the request field {sorted(unknown)[0]!r}.")
        prompts, batched = self._prompts(body)
        count = len(prompts)
        sampling = _per_prompt(body.get("sampling_params") or {}, count, "sampling_params")
        rids = body.get("rid")
        requests: list[Request] = []
        for index, prompt in enumerate(prompts):
            fields = sampling[index]
            if not isinstance(fields, dict):
                raise RequestError("sampling_params must be an object.")
            params = SamplingParams.parse(fields)
            samples = integer(fields.get("n"), "n", default=1, at_least=1)
            batched = batched or samples > 1
            options = self._logprob_options(body, index, count, len(prompt))
            rid = _rid(rids, index, count, samples)
            requests += [self.make(prompt, params, sample, rid=rid, options=options) for sample in range(samples)]
        for request in requests:
            request.stream = bool(body.get("stream"))
        return requests, batched

    def make(
        self, prompt: list[int], params: SamplingParams, sample: int, *, rid: str | None, options: LogprobOptions
    ) -> Request:
        """One request, checked against the model's limits."""
        room = self.limits.context_length - len(prompt)
        if room <= 0:
            raise RequestError(
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({self.limits.context_length} tokens)."
            )
        wanted = params.max_new_tokens
        if wanted is not None and wanted > room:
            raise RequestError(
                "Requested token count exceeds the model's maximum context length of "
                f"{self.limits.context_length} tokens. You requested a total of {len(prompt) + wanted} tokens: "
                f"{len(prompt)} tokens from the input messages and {wanted} tokens for the completion. Please reduce "
                "the number of tokens in the input messages or the completion to fit within the limit."
            )
        if params.stop and self.text.tokenizer is None:
            raise RequestError("Stop strings need a tokenizer, and the model folder has none; use stop_token_ids.")
        seed = self._next_seed() if params.seed is None else params.seed
        return Request(
            rid=rid or uuid.uuid4().hex,
            prompt=prompt,
            params=params,
            max_new_tokens=room if wanted is None else wanted,
            seed=derive_seed(seed, sample),
            stop_ids=frozenset() if params.ignore_eos else self.limits.end_tokens | params.stop_token_ids,
            find_stop=self.text.stop_finder(params.stop),
            logprob_options=options,
        )

    def _prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        text, ids = body.get("text"), body.get("input_ids")
        if text is None and ids is None:
            raise RequestError("Either text, input_ids or input_embeds should be provided.")
        if text is not None and ids is not None:
            raise RequestError("Either text or input_ids should be provided, not both.")
        try:
            if text is not None:
                batched = not isinstance(text, str)
                prompts = [self.text.encode(one) for one in (text if batched else [text])]
            else:
                assert ids is not None
                batched = bool(ids) and isinstance(ids[0], list)
                prompts = list(ids) if batched else [ids]
        except (TypeError, ValueError, LookupError) as error:
            raise RequestError(str(error)) from error
        if not prompts:
            raise RequestError("The request holds no prompt.")
        for prompt in prompts:
            self.check_ids(prompt)
        return prompts, batched

    def check_ids(self, prompt: Any) -> None:
        if not isinstance(prompt, list) or not prompt:
            raise RequestError("input_ids must be a non-empty list of token ids.")
        vocab = self.limits.vocab_size
        for token in prompt:
            if type(token) is not int or not 0 <= token < vocab:
                raise RequestError(f"input_ids holds {token!r}, which is not a token id in [0, {vocab}).")

    def _logprob_options(self, body: dict[str, Any], index: int, count: int, length: int) -> LogprobOptions:
        wanted = bool(_of(body.get("return_logprob"), index, count))
        if not wanted:
            return LogprobOptions()
        start = integer(_of(body.get("logprob_start_len"), index, count), "logprob_start_len", default=-1, at_least=-1)
        if start > length:
            raise RequestError(f"logprob_start_len must be at most the prompt's length {length}, got {start}.")
        ids = body.get("token_ids_logprob") or []
        if not isinstance(ids, list):
            raise RequestError("token_ids_logprob must be a list of token ids.")
        ids = tuple(_of(ids, index, count) if ids and isinstance(ids[0], list) else ids)
        if any(type(token) is not int or not 0 <= token < self.limits.vocab_size for token in ids):
            raise RequestError(f"token_ids_logprob must hold token ids in [0, {self.limits.vocab_size}).")
        return LogprobOptions(
            wanted=True,
            start=start if 0 <= start < length else None,
            top=integer(_of(body.get("top_logprobs_num"), index, count), "top_logprobs_num", default=0, at_least=0),
            token_ids=ids,
            with_text=bool(body.get("return_text_in_logprobs")),
        )


def _of(value: Any, index: int, count: int) -> Any:
    """A field that is either one value for all prompts or a list with one per prompt."""
    if isinstance(value, list):
        if len(value) != count:
            raise RequestError(f"A list of {len(value)} values for {count} prompts.")
        return value[index]
    return value


def _per_prompt(value: Any, count: int, name: str) -> list[Any]:
    if isinstance(value, list) and len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts.")
    return value if isinstance(value, list) else [value] * count


def _rid(rids: Any, index: int, count: int, samples: int) -> str | None:
    """The client's id for a prompt; samples of one prompt need ids of their own."""
    if rids is None or samples > 1:
        return None
    if isinstance(rids, list):
        return str(_of(rids, index, count))
    return str(rids) if count == 1 else f"{rids}_{index}"


def answer(request: Request, text: Text, count: int | None = None) -> dict[str, Any]:
    """SGLang's answer for one request; `count` limits it to its first tokens (streaming)."""
    n = len(request.output) if count is None else count
    reason = request.finish_reason if n == len(request.output) else None
    output = request.output[:n]
    decoded = text.decode(visible(output, request, reason), request.params.skip_special_tokens)
    return {
        "text": trim(decoded, reason, request.params.no_stop_trim),
        "output_ids": output,
        "meta_info": _meta(request, n, reason, text),
    }


def visible(output: Sequence[int], request: Request, reason: dict[str, Any] | None) -> Sequence[int]:
    """The tokens that the text shows: not the token id that stopped it."""
    stopped = reason is not None and isinstance(reason.get("matched"), int)
    return output[:-1] if stopped and not request.params.no_stop_trim else output


def _meta(request: Request, n: int, reason: dict[str, Any] | None, text: Text) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": reason,
        "prompt_tokens": len(request.prompt),
        "weight_version": request.version,
        "num_retractions": request.retractions,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": request.first_scheduled,
        "prefill_finished_time": request.first_token,
        "queue_time": (request.first_scheduled or time.time()) - request.received,
    }
    options = request.logprob_options
    if options.wanted:
        meta.update(_logprobs(request, n, text))
    meta.update(reasoning_tokens=0, completion_tokens=n, cached_tokens=0, cached_tokens_details=None, dp_rank=None)
    if reason is not None:
        end = request.finished_at or time.time()
        seconds = end - (request.first_scheduled or end)
        meta.update(
            weight_versions=[{"version": v, "start": start, "end": stop} for v, start, stop in request.spans],
            e2e_latency=end - request.received,
            request_received_ts=request.received,
            first_token_latency=None if request.first_token is None else request.first_token - request.received,
            api_server_dispatch_finish_ts=request.received,
            request_finished_ts=end,
            decode_throughput=n / seconds if seconds > 0 else None,
            response_sent_to_client_ts=time.time(),
        )
    return meta


def _logprobs(request: Request, n: int, text: Text) -> dict[str, Any]:
    options = request.logprob_options

    def word(token: int) -> str | None:
        return text.decode([token], skip_special_tokens=False) if options.with_text else None

    def rows(scored: Sequence[Scored | None]) -> list[Any]:
        return [None if row is None else entries(*row) for row in scored]

    def entries(logprobs: np.ndarray, ids: np.ndarray) -> list[tuple[float, int, str | None]]:
        tokens = ids.tolist()
        words = map(word, tokens) if options.with_text else repeat(None, len(tokens))
        return list(zip(logprobs.tolist(), tokens, words, strict=True))

    inputs: list[Any] = []
    if request.input_logprobs is not None:
        assert options.start is not None
        scored = zip(request.input_logprobs, request.prompt[options.start :], strict=True)
        inputs = [[logprob, token, word(token)] for logprob, token in scored]
    written = zip(request.logprobs[:n], request.output[:n], strict=True)
    part: dict[str, Any] = {
        "input_token_logprobs": inputs,
        "output_token_logprobs": [[logprob, token, word(token)] for logprob, token in written],
        "output_token_logprobs_length": n,
    }
    if options.top:
        part.update(input_top_logprobs=rows(request.input_top), output_top_logprobs=rows(request.output_top[:n]))
    if options.token_ids:
        part["input_token_ids_logprobs"] = rows(request.input_ids_logprobs)
        part["output_token_ids_logprobs"] = rows(request.output_ids_logprobs[:n])
    return part
