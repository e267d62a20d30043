"""What a person sees of a run: its folder, logs, metrics, timeline, live progress, summary and status.

Nothing is imported here, so that a service that only wants a `Timeline` does not pay for the rest.
"""
