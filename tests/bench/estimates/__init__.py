"""Estimates beside published measurements and beside other tools' estimates of them."""
