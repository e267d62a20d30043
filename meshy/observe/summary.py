"""The end of a run: summary.json, a short table, the reward curve, and what to try next."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TextIO

from meshy.observe.advice import advice
from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import OWN_EVAL, RunFolder, read_json, versions_in, write_json
from meshy.observe.terminal import console, duration, mean, short, tiny
from meshy.observe.timeline import idle_share, read_timeline, steady_window

log = logging.getLogger(__name__)

Status = Literal["finished", "interrupted", "failed"]

EDGE_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run failed: which service, what it said (one line), and where its log is."""

    service: str
    reason: str
    log: str | None = None


def build_summary(
    folder: RunFolder,
    *,
    status: Status,
    started: float,
    ended: float,
    failure: Failure | None = None,
    restarts: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Reads what the run wrote, writes summary.json and returns its content.

    started, ended: unix seconds of the whole run. `reward_first` and `reward_last` are means over the first and last
    5 steps (of a run shorter than 10: over its halves). `eval_before` is the accuracy of weight version 0,
    `eval_after` that of the newest version evaluated after it; `<group>_eval`, `teacher_eval` for one, that of a model
    that is not the policy. `idle_share` is taken over steady steps, all but the
    first and the last. `restarts`: how often each service was started again. What the run did not get to is null.
    """
    steps = read_jsonl(folder.metrics)
    before, after = eval_edges(read_jsonl(folder.evals))
    first, last = reward_edges(steps)
    summary = {
        "status": status,
        "steps": steps[-1]["step"] if steps else 0,
        "reward_first": first,
        "reward_last": last,
        "eval_before": before,
        "eval_after": after,
        **own_evals(folder),
        "wall_seconds": ended - started,
        "idle_share": steady_idle_share(folder, steps),
        "tokens_per_second": mean(row.get("tokens_per_second") for row in steps[1:] or steps),
        "weights": _newest_weights(folder),
        "mismatch_kl": mean(row.get("mismatch_kl") for row in steps),
        "restarts": dict(restarts or {}),
        "started": started,
        "ended": ended,
        "failure": asdict(failure) if failure else None,
    }
    write_json(folder.summary, summary)
    return summary


def reward_edges(steps: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Mean reward of the first and of the last steps: 5, or half of a run shorter than 10, at least one."""
    rewards = [row["reward_mean"] for row in steps if row.get("reward_mean") is not None]
    count = min(EDGE_STEPS, max(1, len(rewards) // 2))
    return mean(rewards[:count]), mean(rewards[-count:])


def eval_edges(evals: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Accuracy of weight version 0, and of the newest version after it."""
    by_version = {row["weight_version"]: row.get("accuracy") for row in evals}
    newest = max(by_version, default=0)
    return by_version.get(0), by_version[newest] if newest > 0 else None


def own_evals(folder: RunFolder) -> dict[str, float]:
    """By `<group>_eval`: the accuracy of models that are not the policy."""
    return {file.stem: read_json(file)["accuracy"] for file in sorted(folder.path.glob(f"*{OWN_EVAL}"))}


def steady_idle_share(folder: RunFolder, steps: Sequence[Mapping[str, Any]]) -> float | None:
    """The idle share over the steady steps; None for a run too short to have any, or without a timeline."""
    busy = read_timeline(folder.timeline)
    window = steady_window(steps, last_end=max((end for _, end in busy), default=None))
    if not busy or window is None or window[1] <= window[0]:
        return None
    return idle_share(folder.path, *window)


def _newest_weights(folder: RunFolder) -> str | None:
    versions = versions_in(folder.weights)
    return str(folder.weights_of(versions[-1])) if versions else None


def print_end(folder: RunFolder, summary: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """The end of a run on the terminal: curve, table and what to try next. Also writes the curve's PNG.

    Never raises for a terminal that went away; a PNG that cannot be drawn is logged.
    """
    from rich.text import Text

    from meshy.observe.curve import Curve, text_chart, write_png

    out = console(stream)
    steps = read_jsonl(folder.metrics)
    curve = Curve.of(steps, read_jsonl(folder.evals))
    if curve.rewards:
        try:
            write_png(curve, folder.reward_curve, folder.name)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            log.warning("cannot draw %s: %s", folder.reward_curve, error)
        unicode = (out.encoding or "").lower().replace("-", "").startswith("utf")
        for line in ["", *text_chart(curve, width=min(out.width, 88), unicode=unicode), ""]:
            out.print(line)
    for label, value in end_rows(folder, summary):
        style = {"finished": "bold green", "failed": "bold red"}.get(value, "")
        out.print(Text(f"{label:<20}").append(value, style), soft_wrap=True)
    out.print("\nwhat to try next", style="bold")
    for text in advice(summary, steps, folder.path):
        out.print(Text(f"  - {text}"), soft_wrap=True)


def end_rows(folder: RunFolder, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of the closing table: label and value."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %"

    rows = [
        ("status", str(summary["status"])),
        ("steps", str(summary["steps"])),
        ("reward", f"{short(summary['reward_first'])} -> {short(summary['reward_last'])}   (first and last steps)"),
        ("held-out accuracy", f"{percent(summary['eval_before'])} -> {percent(summary['eval_after'])}"),
        *((f"{name.removesuffix('_eval')}'s accuracy", percent(summary[name])) for name in own_evals(folder)),
        ("wall time", duration(summary["wall_seconds"])),
        ("tokens/s", short(summary["tokens_per_second"])),
        ("no engine busy", f"{percent(summary['idle_share'])} of the time in steady steps"),
        ("mismatch KL", f"{tiny(summary['mismatch_kl'])} nats a token   (inference against trainer, all steps)"),
        ("weights", summary["weights"] or "-"),
        ("run folder", str(folder.path)),
    ]
    if summary["restarts"]:
        rows.append(("restarts", ", ".join(f"{name} {count} x" for name, count in summary["restarts"].items())))
    return rows + ([("reward curve", str(folder.reward_curve))] if folder.reward_curve.exists() else [])
