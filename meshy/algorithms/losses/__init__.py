"""Losses, one a file, each of use alone or as a term beside another; a recipe names them by import path."""
