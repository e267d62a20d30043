"""How new weights reach inference: on disk, through shared memory, or by a broadcast, inside one bracket."""
