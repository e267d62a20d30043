"""Meshy: reinforcement learning of language models as independent services that meet in TransferQueue."""

__version__ = "0.1.0"
