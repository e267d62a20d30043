"""Rollout: prompts -> groups of responses -> rewards -> rows of partition `train`, at the pace of the trainer's gates.

config.py      RolloutConfig                                                         (torch-free)
preflight.py   what is wrong with the data, seen before anything is spawned          (torch-free)
pacing.py      which position of the data order may be started now                   (pure)
room.py        how much one replica may have in flight                               (pure)
filters.py     which groups are worth training                                       (pure)
routes.py      which of several roles a group's rows are for                         (pure)
episode.py     the agent loop of one sample: token in, token out
group.py       the samples of one prompt, generated and scored together
rows.py        a finished group as rows of partition `train`                         (pure)
evaluation.py  greedy answers to prompts that training never sees
engines.py     what is told of the engines, in health and metrics
service.py     RolloutService: the loop that joins these
"""
