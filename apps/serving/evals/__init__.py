"""Evals: what an answer must fulfil, and runs that ask a model about each item and grade its answers.

A run has no worker of its own. What it asks models is an internal batch, so that places, limits, budgets, prices and
crashes are those of batches.
"""
