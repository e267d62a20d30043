"""Exit codes by which a service process tells its ignitor more than success or failure."""

import signal

FAILED_TO_START = 71
"""It raised before it was ready."""
UNRECOVERABLE = 72
"""It raised `Unrecoverable`."""
ENDED_AS_ASKED = 128 + signal.SIGTERM
"""No success: whoever asked knows, and nobody else takes it for work done."""


class Unrecoverable(RuntimeError):
    """Raised by a service for what its next life would meet again: it is not started again, and the run ends."""
