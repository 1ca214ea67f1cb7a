"""Measuring: protocols, metrics with their formulas, records, comparison, pictures."""
