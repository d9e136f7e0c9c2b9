"""``fused-markov generate``."""


def generate() -> None:
    """Placeholder."""
