"""The training engine: TorchTitan's model, FSDP2 and optimiser containers, composed for reinforcement learning.

Importing this package prepares torch for TorchTitan on machines without an accelerator, so it comes before any
`torchtitan` import. Nothing outside this folder imports `torchtitan`.
"""

from meshy.training.titan.cpu import announce_cpu

announce_cpu()
