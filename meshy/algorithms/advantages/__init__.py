"""Advantage estimators, one a file; a recipe names its own by import path."""
