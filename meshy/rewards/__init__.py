"""Scoring of responses, in worker processes that can be killed."""
