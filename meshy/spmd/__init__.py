"""Base of the roles that compute on several GPUs as one program: one process a GPU, rank 0 leads."""

from meshy.spmd.service import SpmdService

__all__ = ["SpmdService"]
