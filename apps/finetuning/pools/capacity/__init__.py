"""Elastic pools: how many nodes a pool needs, and the engines that start and stop them."""
