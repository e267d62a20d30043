"""What a generation gives, put together from one or more answers of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshy.generation.candidates import Candidates, joined, read_candidates
from meshy.recipe import Sampling


class GenerationError(RuntimeError):
    """A generation that did not come about; the message says what happened, where, and for how long it was tried."""


@dataclass(slots=True, kw_only=True)
class Completion:
    """The tokens that the model wrote, without the prompt; the three lists have equal length.

    logprobs: log softmax(logits / temperature) of each token, without top-p or top-k; greedy, of the unscaled logits.
    versions: the weight version that wrote each token. finish_reason: `stop`, `length` or `abort`.
    replica: URL of the server that wrote the last part. parts: how many answers it took. candidates: the likeliest
    tokens in the place of each; None where they were not asked for.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "abort"
    text: str = ""
    replica: str = ""
    parts: int = 0
    candidates: Candidates | None = None

    def append(self, part: Completion) -> None:
        """Go on with another part, the last one so far."""
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.versions += part.versions
        self.finish_reason = part.finish_reason
        self.text += part.text
        self.replica = part.replica
        self.parts += part.parts
        if part.candidates is not None:
            before = [] if self.candidates is None else [self.candidates]
            self.candidates = joined([*before, part.candidates])


def read_answer(answer: Mapping[str, Any], replica: str, most: int, candidates: int = 0) -> Completion:
    """One answer of `/generate`, which may hold `most` tokens, with as many candidates each as were asked for. Raises
    GenerationError if it does not fit together."""
    try:
        meta = answer["meta_info"]
        tokens: list[int] = answer["output_ids"]
        scored = meta["output_token_logprobs"] or []
        part = Completion(
            tokens=tokens,
            logprobs=[entry[0] for entry in scored],
            versions=token_versions(meta, len(tokens), replica),
            finish_reason=meta["finish_reason"]["type"],
            text=answer["text"],
            replica=replica,
            parts=1,
            candidates=read_candidates(meta.get("output_top_logprobs"), len(tokens), candidates)
            if candidates
            else None,
        )
    except ValueError as error:
        raise GenerationError(f"{replica} gave {error} (top_logprobs_num was {candidates})") from error
    except (KeyError, TypeError, IndexError) as error:
        raise GenerationError(
            f"{replica} gave an answer that is not SGLang's ({type(error).__name__}: {error}): {str(answer)[:300]}"
        ) from error
    if len(part.logprobs) != len(tokens):
        raise GenerationError(f"{replica} answered {len(tokens)} tokens with {len(part.logprobs)} log-probs")
    if len(tokens) > most:
        raise GenerationError(f"{replica} answered {len(tokens)} tokens, but was asked for {most} at most")
    if None in part.logprobs:
        where = part.logprobs.index(None)  # type: ignore[arg-type]
        raise GenerationError(f"{replica} gave no log-prob for token {where} of {len(tokens)}: is one of them NaN?")
    return part


def token_versions(meta: Mapping[str, Any], count: int, replica: str) -> list[int]:
    """The weight version of each of `count` tokens, from the spans that the server reports."""
    versions: list[int] = []
    for span in meta.get("weight_versions") or ():
        if span["start"] != len(versions):
            break
        versions += [version_number(span["version"], replica)] * (span["end"] - span["start"])
    if len(versions) != count:
        raise GenerationError(f"{replica} reports weight versions {meta.get('weight_versions')} for {count} tokens")
    return versions


def weight_version_of(info: object, replica: str) -> int:
    """The version that a replica serves, from its answer to `/model_info`. Raises GenerationError, whatever came."""
    if not isinstance(info, Mapping) or "weight_version" not in info:
        raise GenerationError(f"{replica}/model_info does not tell the weight version, but says {str(info)[:300]!r}")
    return version_number(info["weight_version"], replica)


def version_number(version: object, replica: str) -> int:
    """Weight versions are counted, but the protocol carries any string."""
    try:
        return int(str(version))
    except ValueError as error:
        raise GenerationError(
            f"{replica} serves weight version {version!r}, which is not a number; start it with --weight-version 0"
        ) from error


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """A server may die of a token id that its embedding does not have, so none is sent. Raises GenerationError."""
    if not tokens:
        raise GenerationError("the prompt is empty")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        raise GenerationError(f"the prompt holds token id {bad}, but the model's vocabulary has {vocab_size} entries")


def check_candidates(count: int, vocab_size: int) -> None:
    """A server may die of being asked for more candidates than there are tokens. Raises GenerationError."""
    if not 0 <= count <= vocab_size:
        raise GenerationError(
            f"{count} candidates for each token were asked for; the vocabulary has {vocab_size} entries"
        )


def sampling_fields(sampling: Sampling, max_new_tokens: int, seed: int | None) -> dict[str, Any]:
    """SGLang's `sampling_params`."""
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": max_new_tokens,
    }
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if seed is not None:
        fields["sampling_seed"] = seed
    return fields
