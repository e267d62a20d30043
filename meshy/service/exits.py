"""Exit codes by which a service process tells its ignitor more than success or failure."""

import signal

FAILED_TO_START = 71
"""It raised before it was ready."""
ENDED_AS_ASKED = 128 + signal.SIGTERM
"""No success: whoever asked knows, and nobody else takes it for work done."""
