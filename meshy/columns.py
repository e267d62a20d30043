"""The column contract: what each role reads from and writes to the queue, and the built-in columns.

A partition of the queue is a set of rows with named columns. A role declares what it `Consumes` and `Produces`;
`derive_contract` (contract.py) joins the declarations of a whole run into one `Contract`, which every queue client
checks itself against. A consumer sees a row when every column that it asked for is there.

A row is of route r when the column `route.<r>` was written as the row was created. Readers of a route see its rows
alone, and nobody waits for them, or for what they write, in other rows.

This module is pure: it imports nothing heavy and does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshy.importing import nearest

DType = Literal["int64", "int32", "float32", "float64", "bool", "str", "object"]
Kind = Literal["scalar", "jagged", "jagged2d", "object"]


PER_TOKEN = ("jagged", "jagged2d")
"""Kinds of columns with an entry for each token."""


@dataclass(frozen=True)
class Column:
    """One named column.

    kind: `scalar` (one number or string a row), `jagged` (a 1-D tensor a row), `jagged2d` (an [L, K] tensor a row)
    or `object` (anything that pickles). A `jagged` or `jagged2d` column of partition `train` has the length of the
    row's `tokens`: entry t describes tokens[t].
    """

    name: str
    dtype: DType
    kind: Kind = "scalar"
    doc: str = ""

    @property
    def type(self) -> str:
        return f"{self.kind} {self.dtype}"


@dataclass(frozen=True)
class Consumes:
    """A named reader of a partition.

    columns: a row is visible to this reader once all of these are there. A plain name accepts whatever type the
        producer gives; a Column insists on its type.
    consumer: the reader's name; the group's id where it is None. Each row goes to one replica of a reader, unless
        `per_replica`, where every replica is a reader of its own, named `<consumer>.<replica>`.
    end: this reader clears the rows. Every partition has exactly one such reader; the others acknowledge.
    route: the name of a route; only its rows are for this reader.
    """

    partition: str
    columns: tuple[Column | str, ...]
    consumer: str | None = None
    end: bool = False
    per_replica: bool = False
    route: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns that it waits for, that of its route included."""
        names = (column if isinstance(column, str) else column.name for column in self.columns)
        return tuple(dict.fromkeys((*names, *([] if self.route is None else [route_column(self.route)]))))


@dataclass(frozen=True)
class Produces:
    """Columns that a role writes: as new rows where `creates`, else into rows that are there.

    route: they are written only into rows of this route, which the role must consume. Two producers may share a column
        when they name different routes.
    shared: the columns are a ledger that several roles keep together: all of them may write it, and read it by looking
        at rows, without consuming any.
    """

    partition: str
    columns: tuple[Column, ...]
    creates: bool = False
    route: str | None = None
    shared: bool = False


@dataclass(frozen=True)
class Consumer:
    """A reader as the queue knows it.

    columns: what it waits for, acknowledgements included.
    route: the column that says which rows are for it (one of `columns`); None: all are.
    routed: column -> columns of routes; the column is waited for only in rows that have one of these.
    """

    name: str
    group: str
    columns: tuple[str, ...]
    end: bool
    route: str | None = None
    routed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class PartitionContract:
    """Everything agreed about one partition."""

    name: str
    columns: Mapping[str, Column]
    consumers: Mapping[str, Consumer]
    writers: Mapping[str, tuple[str, ...]]
    """Group id -> the columns that it may write; a reader that must acknowledge may write its `ack.` column."""

    @property
    def end_consumer(self) -> Consumer:
        return next(consumer for consumer in self.consumers.values() if consumer.end)


@dataclass(frozen=True)
class Contract:
    """The partitions of a run. `capacity` bounds the rows alive in each."""

    partitions: Mapping[str, PartitionContract]
    capacity: Mapping[str, int] = field(default_factory=dict)

    def partition(self, name: str) -> PartitionContract:
        if name not in self.partitions:
            raise KeyError(f"no role declares partition {name!r}{nearest(name, self.partitions)}")
        return self.partitions[name]

    def to_json(self) -> dict:
        return {
            "partitions": {
                name: {
                    "columns": {c.name: [c.dtype, c.kind] for c in partition.columns.values()},
                    "consumers": {
                        c.name: {
                            "group": c.group,
                            "columns": list(c.columns),
                            "end": c.end,
                            "route": c.route,
                            "routed": {column: list(routes) for column, routes in c.routed.items()},
                        }
                        for c in partition.consumers.values()
                    },
                    "writers": {group: list(names) for group, names in partition.writers.items()},
                }
                for name, partition in self.partitions.items()
            },
            "capacity": dict(self.capacity),
        }

    @classmethod
    def from_json(cls, data: Mapping) -> Contract:
        return cls(
            partitions={
                name: PartitionContract(
                    name=name,
                    columns={c: Column(c, dtype, kind) for c, (dtype, kind) in partition["columns"].items()},
                    consumers={
                        c: Consumer(
                            c,
                            v["group"],
                            tuple(v["columns"]),
                            v["end"],
                            v["route"],
                            {column: tuple(routes) for column, routes in v["routed"].items()},
                        )
                        for c, v in partition["consumers"].items()
                    },
                    writers={group: tuple(names) for group, names in partition["writers"].items()},
                )
                for name, partition in data["partitions"].items()
            },
            capacity=dict(data["capacity"]),
        )


def ack_column(consumer: str) -> str:
    """The column in which a reader that does not clear says that it is done with a row."""
    return f"ack.{consumer}"


def route_column(route: str) -> str:
    """The column whose presence says that a row is of this route."""
    return f"route.{route}"


# The built-in columns -------------------------------------------------------------------------------------------------

UID = Column("uid", "str", doc="identity of the row; checked on every read and write")

PROMPT_ID = Column("prompt_id", "str", doc="which example of the data")
GROUP_ID = Column("group_id", "str", doc="the rows that answer one prompt together")
GROUP_SIZE = Column("group_size", "int64", doc="how many rows those are")
POSITION = Column("position", "int64", doc="the group's place in the data order")
BATCH = Column("batch", "int64", doc="the batch that the row is for, or ANY_BATCH")
ANY_BATCH = -1
"""Of a row that is trained by whichever batch takes it first."""
TOKENS = Column("tokens", "int64", "jagged", "prompt and response(s), as fed and as generated")
LOSS_MASK = Column("loss_mask", "bool", "jagged", "true exactly on tokens that the policy wrote")
ROLLOUT_LOGPROBS = Column(
    "rollout_logprobs", "float32", "jagged", "log softmax(logits / temperature) when sampled; no top-p, no top-k"
)
TOKEN_VERSIONS = Column("token_versions", "int32", "jagged", "the weight version that wrote each token")
N_TOKENS = Column("n_tokens", "int64", doc="tokens of the row")
N_WRITTEN = Column("n_written", "int64", doc="tokens that the policy wrote")
OLDEST_VERSION = Column("oldest_version", "int64", doc="the oldest weight version that wrote a token of the row")
REWARD = Column("reward", "float32", doc="raw score of the response")
FINISH_REASON = Column("finish_reason", "str", doc="stop, length or abort")
TRUNCATED = Column("truncated", "bool", doc="the response ended by length")
N_TURNS = Column("n_turns", "int64", doc="turns that the policy wrote")
LOST = Column("lost", "int64", doc="groups that gave no rows since the last one that did, on this replica; else 0")
T_SENT = Column("t_sent", "float64", doc="unix seconds when the group's generation was asked for")
T_GENERATED = Column("t_generated", "float64", doc="unix seconds when the group was generated")
T_REWARDED = Column("t_rewarded", "float64", doc="unix seconds when the group's rewards were known")
STUDENT_TOPK_IDS = Column("student_topk_ids", "int32", "jagged2d", "the policy's likeliest tokens, [L, K]")
STUDENT_TOPK_LOGPROBS = Column(
    "student_topk_logprobs", "float32", "jagged2d",
    "their log softmax(logits / temperature) when sampled, descending; no top-p, no top-k",
)  # fmt: skip
GREEDY_REWARD = Column("greedy_reward", "float32", doc="score of the greedy response to the row's prompt")

TRAIN = "train"
TRAIN_COLUMNS = (
    UID, PROMPT_ID, GROUP_ID, GROUP_SIZE, POSITION, BATCH, TOKENS, LOSS_MASK, ROLLOUT_LOGPROBS, TOKEN_VERSIONS,
    N_TOKENS, N_WRITTEN, OLDEST_VERSION, REWARD, FINISH_REASON, TRUNCATED, N_TURNS, LOST, T_SENT, T_GENERATED,
    T_REWARDED,
)  # fmt: skip
"""What rollout writes for every sample."""

GEN_GATE = "gen_gate"
GATE_COLUMNS = (
    UID,
    Column("incarnation", "str", doc="the trainer's life; a restarted trainer begins a new one"),
    Column("gate_step", "int64", doc="0, 1, 2 ... without a gap within an incarnation"),
    Column("weight_version", "int64", doc="the version that inference serves now"),
    Column("samples_retired", "int64", doc="samples trained or dropped since the run began"),
    Column("stop", "bool", doc="the last gate: nothing more is to be generated for training"),
)

EVAL = "eval"
EVAL_COLUMNS = (
    UID,
    Column("weight_version", "int64"),
    Column("accuracy", "float64", doc="mean reward of greedy answers to held-out prompts"),
    Column("count", "int64", doc="held-out prompts answered"),
    Column("seconds", "float64"),
    Column("response_length_mean", "float64", doc="tokens"),
)
