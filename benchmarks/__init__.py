"""Comparisons with other engines; not part of the installed package."""
