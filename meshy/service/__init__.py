"""What every role shares: one process, its place in the run, readiness, the admin endpoint, an orderly end."""

from meshy.service.base import Service
from meshy.service.context import Context

__all__ = ["Context", "Service"]
