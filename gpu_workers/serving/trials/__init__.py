"""Tests of a new adapter before customers may use it, on the canary engine and on the engine of all customers."""
