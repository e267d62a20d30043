"""The client of SGLang's protocol, shared by all who generate or publish weights."""

from meshy.generation.client import GenerationClient
from meshy.generation.completion import Completion, GenerationError
from meshy.generation.control import ReplicaError

__all__ = ["Completion", "GenerationClient", "GenerationError", "ReplicaError"]
