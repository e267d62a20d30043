"""The token ring: which of the groups that share GPUs may use them.

turns.py    the ledger as its readers see it, and who comes next                     (pure)
member.py   what one replica of a group does next                                    (pure)
keeper.py   what the ignitor of the ring's first GPU does next                       (pure)
"""
