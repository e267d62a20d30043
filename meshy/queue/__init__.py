"""The only door to TransferQueue: its processes, a typed client, the doorbell.

endpoints.py   where the queue's processes listen                      (pure)
errors.py      what can go wrong                                       (pure)
local.py       a real queue on free ports of this machine, for tests and tools
client.py      AsyncQueueClient; sync.py: QueueClient, the same, blocking
server.py      python -m meshy.queue.server: the controller's and the storage units' processes
"""
