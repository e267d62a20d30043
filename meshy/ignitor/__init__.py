"""One ignitor stands on every GPU: it discovers, checks, spawns what is its own, watches and stops.

discover.py    who is there: the GPU list, all-gathered through torchrun's store
agreement.py   the same run on every rank: recipe, topology, run folder, model, ports
ports.py       tries and holds the run's ports on this host
children.py    processes: spawn, watch, stop
ending.py      how a run ends, said once and heard by all ignitors
__main__.py    python -m meshy.ignitor RECIPE [path=value ...]
"""
