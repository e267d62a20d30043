"""What became of a run, and what to try next. Pure: from the summary and the metrics to lines of text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from meshy.observe.terminal import mean, short

Outcome = Literal["learned", "not learned", "unclear", "interrupted", "failed"]

LEARNED = 0.05


def outcome(summary: Mapping[str, Any]) -> Outcome:
    """What became of the run: it learned when held-out accuracy (else the reward) rose by at least 0.05."""
    if summary["status"] != "finished":
        return "failed" if summary["status"] == "failed" else "interrupted"
    for before, after in (("eval_before", "eval_after"), ("reward_first", "reward_last")):
        if summary[before] is not None and summary[after] is not None:
            return "learned" if summary[after] - summary[before] >= LEARNED else "not learned"
    return "unclear"


def advice(summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], run: Path) -> list[str]:
    """What to try next, most useful first."""
    events = f"tensorboard --logdir {run / 'tensorboard'}   shows every curve"
    match outcome(summary):
        case "failed":
            failure = summary["failure"] or {}
            where = f"; its log: {failure['log']}" if failure.get("log") else f"; the logs: {run / 'logs'}"
            return [
                f"{failure.get('service', 'the run')} failed: {failure.get('reason', 'see the logs')}{where}",
                f"meshy status {run}   shows how far the run came",
                "mend the cause and start the same command again; each run gets a folder of its own",
            ]
        case "interrupted":
            again = "the same command begins anew, in a folder of its own; a run cannot be resumed yet"
            return [*_load_weights(summary), events, again]
        case "learned":
            return [*_load_weights(summary), events, *_next_runs()]
        case "not learned":
            return [*_why_not(summary, steps, run), events]
    return [events, "add an evaluation set to the task, to see what is learned on prompts that training never sees"]


def _load_weights(summary: Mapping[str, Any]) -> list[str]:
    if not summary["weights"]:
        return []
    return [f'AutoModelForCausalLM.from_pretrained("{summary["weights"]}")   loads what was trained (transformers)']


def _next_runs() -> list[str]:
    return [
        "on GPUs: the same recipe with a model of yours; its first lines show a command for 8 GPUs",
        "any setting goes on the command line: steps=200, trainer.lr=2e-4, seed=1",
    ]


def _why_not(summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], run: Path) -> list[str]:
    """The likeliest reasons why nothing was learned, from the metrics."""
    samples = f"look at {run / 'trajectories.jsonl'}"
    reward, spread = summary["reward_last"], mean(row.get("reward_std") for row in steps)
    before = summary["eval_before"]
    if before is not None and before >= 0.95:
        return ["the model could do this task from the start: take a harder one"]
    lines = []
    if spread is not None and spread < 1e-6:
        lines.append(
            f"every sample got the same reward ({short(reward)}), so there was nothing to learn from: {samples}, check "
            "the reward, take an easier task or a higher sampling.temperature"
        )
    if any(row.get("loss") is None for row in steps):
        lines.append("the loss was not finite: lower trainer.lr")
    first, after = summary["reward_first"], summary["eval_after"]
    fell = first is not None and reward is not None and reward <= first - LEARNED
    if fell or (before is not None and after is not None and after <= before - LEARNED):
        lines.append("the policy got worse than it was: lower trainer.lr")
    gradient = mean(row.get("grad_norm") for row in steps)
    if gradient == 0 and not lines:
        lines.append(
            "every gradient was zero although rewards differed: compare samples of the same prompt (rollout.group_size "
            f"of 2 or more), and {samples}: were all responses masked or truncated?"
        )
    if not lines:
        lines = [f"raise trainer.lr or steps; {samples}, do the rewards fit the responses?"]
    return lines
