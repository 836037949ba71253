"""Layers of a decoder. Of `models` they know the plain descriptions alone: config, partition and weight slots."""
