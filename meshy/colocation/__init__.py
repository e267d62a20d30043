"""The token ring: which of the groups that share GPUs may use them.

turns.py     the ledger as its readers see it, and who comes next                     (pure)
member.py    what one replica of a group does next                                    (pure)
keeper.py    what the ignitor of the ring's first GPU does next                       (pure)
books.py     looking at the ledger in the queue, and writing into it
follower.py  a thread that looks and acts, again and again: agent.py of a replica, keeping.py of the keeper
"""
