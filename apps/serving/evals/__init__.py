"""Evals: criteria for answers, and runs that ask a model about each item and grade its answers.

A run has no separate worker. It sends its requests as an internal batch, so the places, limits, budgets, prices and
crash handling of batches apply.
"""
