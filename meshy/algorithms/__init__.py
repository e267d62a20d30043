"""Pure tensor functions: advantages, policy losses, KL estimates, aggregation. Imports torch only."""
