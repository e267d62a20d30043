"""The configuration of models that score rows and stay as they are: teachers, and a reference. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshy.columns import LOSS_MASK, N_TOKENS, TOKENS, TRAIN, Column, Consumes, Produces
from meshy.engine_options import EngineOptions
from meshy.recipe import Limit, Recipe, out_of_range

Score = Literal["sampled", "candidates", "topk", "vocabulary"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(EngineOptions):
    """What every model that scores has beside its engine's options.

    model: a folder in Hugging Face format, or a hub id; None: the run's own model, as it is at the start.
    rows: how many must be in `train` before it takes any. It then works for a while: in a ring, where others must give
        up the GPUs for it, a batch; else 1. None: so.
    """

    max_restarts: int = 3
    model: str | None = None
    rows: int | None = None

    def rows_to_wait_for(self, recipe: Recipe) -> int:
        """Rows that are to be in the partition before any is taken."""
        if self.rows is not None:
            return self.rows
        return recipe.batch_size if self.in_ring(recipe) else 1

    def faults(self, recipe: Recipe) -> list[str]:
        faults = super().faults(recipe)
        if self.rows is not None and self.rows < 1:
            faults.append(f"rows: expected at least 1, or none, got {self.rows}")
        try:
            alive = recipe.batch_size
        except LookupError as error:
            return [*faults, f"{error}; add a trainer"]
        if self.rows is not None and self.rows > alive:
            faults.append(f"rows: {self.rows} never come together where a batch has {alive}; set it to at most that")
        return faults


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(ModelOptions):
    """Scores the tokens that the policy wrote, by a model that stays as it is (on-policy distillation).

    scores: what it writes, in columns that begin with `prefix`: of the sampled tokens ("sampled":
        `<prefix>_logprobs` [L]); of the candidates that rollout names in column `candidates` ("candidates":
        `<prefix>_topk_logprobs` [L, K]); of its own k likeliest ("topk": `<prefix>_topk_ids`, `<prefix>_topk_logprobs`
        [L, K]); of all tokens of the vocabulary ("vocabulary": `<prefix>_vocab_logprobs` [L, V], which is much: V
        float32 numbers a token). Log-probs are log softmax(logits / temperature), 0 where loss_mask is false.
    k: of "topk". temperature: None for that of sampling.
    route: of several teachers, the one whose rows have the column `route.<route>` (see `routes` of rollout). None: all.
    token_map: where this model's tokenizer differs from the policy's: a JSON file of a list, or the import path of a
        function (policy's folder, own folder) -> list; entry i is the own id of the policy's token i, -1 for none.
    evaluate: how well it does itself: greedy answers to the first so many held-out prompts, before anything else; in
        summary.json as `<group>_eval`. 0: not.
    part_mb: MiB of logits that are made at a time, however long the rows are; what is computed from them takes about
        three times as much beside. Only what `scores` names is kept.
    """

    service: ClassVar[str] = "meshy.scoring.teacher:TeacherService"

    scores: tuple[Score, ...] = ("sampled",)
    prefix: str = "teacher"
    k: int = 8
    candidates: str = "student_topk_ids"
    temperature: float | None = None
    route: str | None = None
    token_map: str | Callable[..., Any] | None = None
    evaluate: int = 0
    part_mb: int = 256

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns that it writes, by what they are."""
        p = self.prefix
        written = {
            "sampled": [Column(f"{p}_logprobs", "float32", "jagged", "of the sampled tokens")],
            "candidates": [Column(f"{p}_topk_logprobs", "float32", "jagged2d", "of the candidates")],
            "topk": [
                Column(f"{p}_topk_ids", "int32", "jagged2d", "the likeliest tokens, the first one first"),
                Column(f"{p}_topk_logprobs", "float32", "jagged2d", "of those"),
            ],
            "vocabulary": [Column(f"{p}_vocab_logprobs", "float32", "jagged2d", "of every token there is")],
        }
        return {column.name: column for score in self.scores for column in written[score]}

    @property
    def reads(self) -> tuple[str, ...]:
        """Per-token columns that scoring takes."""
        return (TOKENS.name, LOSS_MASK.name, *((self.candidates,) if "candidates" in self.scores else ()))

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        candidates = Column(self.candidates, "int32", "jagged2d")
        reads = (candidates if name == self.candidates else name for name in self.reads)
        return (Consumes(TRAIN, (*reads, N_TOKENS.name), route=self.route),)

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces(TRAIN, tuple(self.columns.values()), route=self.route),)

    def faults(self, recipe: Recipe) -> list[str]:
        limits: tuple[Limit, ...] = (
            (len(self.scores) > 0, "scores", self.scores, "one at least of sampled, candidates, topk, vocabulary"),
            (len(set(self.scores)) == len(self.scores), "scores", self.scores, "each of them once"),
            (
                not {"candidates", "topk"} <= set(self.scores), "scores", self.scores,
                "candidates or topk, not both, for they share a column",
            ),
            (self.k >= 1, "k", self.k, "at least 1"),
            (self.prefix.isidentifier(), "prefix", repr(self.prefix), "a name such as 'teacher'"),
            (
                self.temperature is None or self.temperature > 0,
                "temperature", self.temperature, "more than 0, or none for that of sampling",
            ),
            (self.evaluate >= 0, "evaluate", self.evaluate, "0 (not) or more prompts"),
            (self.part_mb >= 1, "part_mb", self.part_mb, "at least 1 MiB"),
        )  # fmt: skip
        faults = out_of_range(limits)
        return faults + super().faults(recipe)

    def preflight(self, recipe: Recipe) -> list[str]:
        from meshy.scoring.preflight import teacher_faults

        return teacher_faults(self, recipe)


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(TeacherConfig):
    """The policy as it was at the start, or another model, to be stayed near to: writes `ref_logprobs` [L]."""

    prefix: str = "ref"
