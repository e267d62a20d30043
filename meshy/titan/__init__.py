"""TorchTitan's models under FSDP2, with an optimiser or frozen, and the batches that they eat: for whoever trains or
scores.

Importing this package prepares torch for TorchTitan on machines without an accelerator, so it comes before any
`torchtitan` import. Nothing outside this folder imports `torchtitan`.
"""

from meshy.titan.cpu import announce_cpu

announce_cpu()
