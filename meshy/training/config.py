"""The configuration of the trainer. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

from meshy.algorithms.correction import Correction, OldLogprobs
from meshy.algorithms.kl_reward import MAX_ERROR, KLInReward
from meshy.algorithms.overlong import Overlong
from meshy.columns import EVAL, EVAL_COLUMNS, GATE_COLUMNS, GEN_GATE, TRAIN, TRAIN_COLUMNS, Column, Consumes, Produces
from meshy.engine_options import OptimizerOptions
from meshy.importing import nearest
from meshy.recipe import Limit, Recipe, out_of_range
from meshy.training.terms import LossTerm
from meshy.training.weights.choice import InFlight, hindrance

LIVE_GATES = 16
"""Gates that may wait for their readers at once."""

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(OptimizerOptions):
    """Reinforcement learning of the policy on rows of partition `train`.

    What is learnt from:
        batch_size: samples (prompts x group size) between two publishes. mini_batches: optimiser steps that a batch is
        cut into. stream_minibatch: take each as soon as its rows are there, instead of the whole batch first; groups
        with the oldest tokens first, then in the order in which they were complete. epochs: how often the batch is
        passed over. also_consumes: more columns of `train` to wait for, written by other roles; per-token ones reach
        the loss and the token-level advantage, numbers of a sample its advantage. rewards: the columns that add up to a
        sample's reward, each with its weight. overlong: what long responses lose of it. kl_in_reward: what each token
        loses that a reference finds unlikely; token_advantage sees it. max_staleness: the oldest weight version,
        counted back from the trained one, whose tokens may be trained: groups with older ones are dropped and replaced;
        None: no bound but the window of rollout. allow_filtered_sampling: train although top-p, top-k or min-p cut the
        distribution that was sampled from.
    How:
        advantage, token_advantage, loss: import path (`module:function`) or callable, see
        `meshy.algorithms.interface`. advantage: of whole samples; None for 0. token_advantage: of their tokens, from
        that one, the rewards and other columns; None for the sample's at each of its tokens. advantage_options,
        token_advantage_options: their own. terms: added to the loss, each with a weight of its own. clip_low,
        clip_high, dual_clip, aggregation, aggregation_constant: given to the loss and its terms; loss_options: to the
        loss. frozen_batches: at the beginning, of which the policy learns nothing and is published as it is, while a
        critic warms up; warm-up and schedule of the policy begin after them. old_logprobs: the policy whose
        ratio is clipped: as the inference engine reported it ("rollout"), scored anew by the trainer before its first
        step ("recompute"), or estimated without that pass, between the engine's and the current ones by how many
        versions old each token is ("loglinear"). correction: off-policy weights and rejection.
        schedule: of the learning rate after its warm-up, down to final_lr_factor of it; in optimiser steps. lr, betas
        and the like: see `OptimizerOptions`.
    Where weights go:
        publish_to: groups that serve the policy. publish: how weights travel: "disk", a folder that replicas load;
        "shm", shared memory of one host; "collective", a broadcast; "auto" takes shm where every replica is on the
        trainer's host, disk where one has dp > 1 or quantised weights, else collective. publish_in_flight: requests in
        flight are interrupted and go on with the new weights, their keys and values computed anew ("retract") or kept
        as the old weights made them ("keep", as in PipelineRL, arXiv 2509.19128: long prefixes are not read again), end
        first ("drain": within half of weights_deadline, so a response must not take longer), or are given back
        unfinished ("abort"), to go on or to begin anew as `interrupted` of rollout says. publish_dtype: of the weights
        that leave the trainer; "auto" keeps on disk what the initial model's config.json says, and streams what
        `publish_to` is told to compute in. bucket_mb: MiB of memory through which weights stream (shm, collective), at
        least the largest tensor. weights_deadline: seconds for a publish, until one replica serves the version; one
        that hangs may use up half of what is left, then the others go on without it, and it is brought up to date when
        it can be. Replicas of the trainer's own ring load it in their turn and are waited for without a deadline.
        write_every: versions between two that are put on disk, whatever way weights travel, for replicas that restart;
        the last is always. keep_weights: versions kept there. verify_every: versions between two after which every
        replica's checksums are compared with the trainer's; 0: never.
    The engine:
        activation_checkpointing: none, selective, full. The rest: see `EngineOptions`.
    """

    service: ClassVar[str] = "meshy.training.service:TrainerService"
    can_restart: ClassVar[bool] = False
    ends_run: ClassVar[bool] = True

    batch_size: int
    mini_batches: int = 1
    stream_minibatch: bool = False
    epochs: int = 1
    also_consumes: tuple[str, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=lambda: {"reward": 1.0})
    overlong: Overlong | None = None
    kl_in_reward: KLInReward | None = None
    max_staleness: int | None = None
    allow_filtered_sampling: bool = False

    advantage: str | Callable[..., Any] | None = "meshy.algorithms.advantages.grpo:grpo_advantage"
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    token_advantage: str | Callable[..., Any] | None = None
    token_advantage_options: Mapping[str, Any] = field(default_factory=dict)
    loss: str | Callable[..., Any] = "meshy.algorithms.losses.ppo_clip:ppo_clip_loss"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"
    aggregation_constant: float | None = None
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    terms: tuple[LossTerm, ...] = ()
    frozen_batches: int = 0
    old_logprobs: OldLogprobs = "rollout"
    correction: Correction = field(default_factory=Correction)

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_factor: float = 0.0

    publish_to: tuple[str, ...] = ("inference",)
    publish: Literal["auto", "disk", "shm", "collective"] = "auto"
    publish_in_flight: InFlight = "retract"
    publish_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    bucket_mb: int = 64
    weights_deadline: float = 300.0
    write_every: int = 1
    keep_weights: int = 2
    verify_every: int = 10

    activation_checkpointing: Literal["none", "selective", "full"] = "none"

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Samples that are waited for at once, one number a part of the batch."""
        parts = self.mini_batches if self.stream_minibatch else 1
        edges = [self.batch_size * i // parts for i in range(parts + 1)]
        return tuple(end - start for start, end in pairwise(edges))

    @property
    def further_columns(self) -> tuple[str, ...]:
        """Columns to wait for beside those that rollout always writes."""
        always = {column.name for column in TRAIN_COLUMNS}
        reference = () if self.kl_in_reward is None else (self.kl_in_reward.reference,)
        return tuple(
            name for name in dict.fromkeys((*self.also_consumes, *self.rewards, *reference)) if name not in always
        )

    @property
    def optimiser_steps_per_batch(self) -> int:
        return self.epochs * self.mini_batches

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (
            Consumes(TRAIN, (*TRAIN_COLUMNS, *map(self._wanted, self.further_columns)), end=True),
            Consumes(EVAL, EVAL_COLUMNS, end=True),
            Consumes(GEN_GATE, GATE_COLUMNS, end=True),
        )

    def _wanted(self, name: str) -> Column | str:
        """A column, and of which type it must be where that matters before it reaches a loss."""
        if name in self.rewards:
            return Column(name, "float32")
        if self.kl_in_reward is not None and name == self.kl_in_reward.reference:
            return Column(name, "float32", "jagged")
        return name

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces(GEN_GATE, GATE_COLUMNS, creates=True),)

    def live_rows(self, recipe: Recipe) -> dict[str, int]:
        return {GEN_GATE: LIVE_GATES}

    def faults(self, recipe: Recipe) -> list[str]:
        limits: tuple[Limit, ...] = (
            (self.batch_size >= 1, "batch_size", self.batch_size, "at least 1"),
            (self.mini_batches >= 1, "mini_batches", self.mini_batches, "at least 1"),
            (self.mini_batches <= max(self.batch_size, 1), "mini_batches", self.mini_batches, "at most batch_size"),
            (self.epochs >= 1, "epochs", self.epochs, "at least 1"),
            (self.max_staleness is None or self.max_staleness >= 0, "max_staleness", self.max_staleness, "0 or more"),
            (self.clip_low >= 0, "clip_low", self.clip_low, "0 or more"),
            (self.clip_high >= 0, "clip_high", self.clip_high, "0 or more"),
            (self.dual_clip is None or self.dual_clip > 1, "dual_clip", self.dual_clip, "more than 1, or none"),
            (self.frozen_batches >= 0, "frozen_batches", self.frozen_batches, "0 or more"),
            (
                any(self.rewards.values()), "rewards", dict(self.rewards),
                'a column and its weight at least, such as {"reward": 1.0}',
            ),
            (
                self.token_advantage is not None or not self.token_advantage_options,
                "token_advantage", "none", "an estimator, since token_advantage_options are set",
            ),
            (
                self.advantage is not None or not self.advantage_options,
                "advantage", "none", "an estimator, since advantage_options are set",
            ),
            (0 <= self.final_lr_factor <= 1, "final_lr_factor", self.final_lr_factor, "0 to 1"),
            (self.bucket_mb >= 1, "bucket_mb", self.bucket_mb, "at least 1 MiB"),
            (self.write_every >= 1, "write_every", self.write_every, "at least 1"),
            (self.verify_every >= 0, "verify_every", self.verify_every, "0 or more"),
            (self.keep_weights >= 1, "keep_weights", self.keep_weights, "at least 1"),
            (self.weights_deadline > 0, "weights_deadline", self.weights_deadline, "more than 0 seconds"),
            (
                self.in_ring(recipe)  # then no rank waits in a collective for weights, which go by a folder
                or self.weights_deadline < self.collective_timeout or self.collective_timeout <= 0,
                "weights_deadline", self.weights_deadline,
                f"less than collective_timeout ({self.collective_timeout}), for meanwhile the other ranks wait",
            ),
            (
                self.aggregation != "seq-mean-token-sum-norm" or (self.aggregation_constant or 0) > 0,
                "aggregation_constant", self.aggregation_constant, "a positive number for seq-mean-token-sum-norm",
            ),
        )  # fmt: skip
        faults = out_of_range(limits)
        replicas = [group.replicas for group in recipe.groups if group.config is self]
        if replicas and replicas[0] != 1:
            faults.append(f"replicas: expected 1 trainer, got {replicas[0]}; give it more GPUs with gpus_per_replica")
        faults += super().faults(recipe)
        faults += self.correction.faults(self.old_logprobs)
        faults += [] if self.kl_in_reward is None else self.kl_in_reward.faults()
        faults += self._term_faults()
        if 0 < recipe.steps <= self.frozen_batches:
            faults.append(f"frozen_batches: expected less than steps ({recipe.steps}), got {self.frozen_batches}")
        faults += self._kl_faults() + self._reward_faults()
        faults += [] if self.overlong is None else self.overlong.faults()
        if self.kl_in_reward is not None and self.token_advantage is None:
            faults.append(
                "kl_in_reward: an advantage of whole samples does not see the reward of a token; set token_advantage, "
                "or take the KL into the loss, as one of `terms`"
            )
        return faults + self._stream_faults(recipe) + self._sampling_faults(recipe) + self._publish_faults(recipe)

    def _reward_faults(self) -> list[str]:
        """Of what rollout always writes; the types of other columns are compared with what is produced."""
        numbers = [c.name for c in TRAIN_COLUMNS if c.kind == "scalar" and c.dtype not in ("str", "object")]
        return [
            f"rewards: {c.name} is {c.type}, and no number of a sample; name others, such as 'reward'"
            for c in TRAIN_COLUMNS
            if c.name in self.rewards and c.name not in numbers
        ]

    def _term_faults(self) -> list[str]:
        labels = [term.label for term in self.terms]
        return [
            f"terms: {labels.count(label)} of them are called {label!r}, as are their metrics; give each a `name`"
            for label in dict.fromkeys(labels)
            if labels.count(label) > 1
        ]

    def _kl_faults(self) -> list[str]:
        kl = self.kl_in_reward
        if kl is not None and any(kl.reference == column.name for column in TRAIN_COLUMNS):
            return [
                f"kl_in_reward.reference: {kl.reference} is what rollout writes of the policy itself; name the column "
                "of a reference"
            ]
        least = int(MAX_ERROR * self.batch_size) + 1
        if kl is None or kl.target is None or kl.horizon >= least:
            return []
        return [
            f"kl_in_reward.horizon: expected at least {least} for a batch of {self.batch_size}, or one could "
            f"take the coefficient to 0, got {kl.horizon}"
        ]

    @staticmethod
    def group_sizes(recipe: Recipe) -> set[int]:
        """Samples of one prompt, as whoever makes them says."""
        return {size for g in recipe.groups if (size := getattr(g.config, "group_size", 0)) > 0}

    def preflight(self, recipe: Recipe) -> list[str]:
        from meshy.training.preflight import function_faults, model_faults

        return model_faults(self, recipe) + function_faults(self, recipe)

    def _stream_faults(self, recipe: Recipe) -> list[str]:
        if not self.stream_minibatch or self.mini_batches < 1:
            return []
        faults = []
        if self.epochs > 1:
            faults.append(
                f"stream_minibatch: its mini-batches are trained once, as they come, not {self.epochs} times; set "
                "epochs to 1, or turn it off"
            )
        if recipe.deterministic:
            faults.append(
                "stream_minibatch: groups are trained in the order in which they were complete, so a run does not "
                "repeat itself; turn it off, or set deterministic=false"
            )
        # A batch that is no whole groups is the fault of whoever makes them, and said there.
        for size in sorted(size for size in self.group_sizes(recipe) if self.batch_size % size == 0):
            if any(part % size for part in self.part_sizes):
                faults.append(
                    f"mini_batches: {self.batch_size} samples streamed in {self.mini_batches} parts do not divide into "
                    f"groups of {size}; set it to a divisor of {self.batch_size // size}, or turn stream_minibatch off"
                )
        return faults

    def _sampling_faults(self, recipe: Recipe) -> list[str]:
        sampling = recipe.sampling
        if sampling.temperature <= 0:
            return [f"sampling.temperature: expected more than 0 to train on samples, got {sampling.temperature}"]
        filtered = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        if not filtered or self.allow_filtered_sampling:
            return []
        return [
            "sampling: rows sampled with top_p < 1, top_k or min_p do not follow the distribution that is trained; "
            "turn them off, or set allow_filtered_sampling=true if it is meant"
        ]

    def _publish_faults(self, recipe: Recipe) -> list[str]:
        serving = {group.id: group for group in recipe.groups if group.config.serves_http}
        faults = [
            f"publish_to: no group {id!r} serves a model{nearest(id, serving)}"
            for id in self.publish_to
            if id not in serving
        ]
        ring_of = {id: ring.id for ring in recipe.rings for id, _ in ring.members}
        mine = next((ring_of.get(group.id) for group in recipe.groups if group.config is self), None)
        for id in self.publish_to:
            if id in serving and ring_of.get(id) != mine:
                faults.append(
                    f"publish_to: {id!r} is in ring {ring_of.get(id, 'none')!r}, this trainer in {mine or 'none'!r}; "
                    "weights would go while one of them does not have its GPUs: put both into one ring, or neither"
                )
            target = serving[id].config if id in serving else None
            dp, quantization = getattr(target, "dp", 1), getattr(target, "quantization", None)
            if why := hindrance(self.publish, dp=dp, quantization=quantization, in_ring=id in ring_of):
                faults.append(f"publish: {self.publish!r} cannot be used: {id!r} {why}")
        if mine is not None and self.publish_in_flight != "retract":
            faults.append(
                f"publish_in_flight: in a ring, what is in flight always waits and goes on; {self.publish_in_flight!r} "
                "is for inference on GPUs of its own: set it to 'retract'"
            )
        if self.publish_in_flight == "keep" and any(getattr(g.config, "window", None) == 1 for g in recipe.groups):
            faults.append(
                "publish_in_flight: 'keep' is for responses that go on under new weights, and with a window of 1 there "
                "are none, but prompts cached by SGLang would be used again under other weights: set it to 'retract'"
            )
        return faults

    def dtype_served(self, recipe: Recipe) -> str:
        """The dtype that weights are published in: `publish_dtype`, or what all of `publish_to` are told to compute in;
        "auto" where that is left to the model."""
        told = {getattr(recipe.group(id).config, "dtype", "auto") for id in self.publish_to}
        return told.pop() if self.publish_dtype == "auto" and len(told) == 1 else self.publish_dtype
