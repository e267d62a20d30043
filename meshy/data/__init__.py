"""Datasets and the order in which their prompts are used."""
