"""Triton device code. Launchers live in `fused_markov.engines`; nothing here runs on the host."""
