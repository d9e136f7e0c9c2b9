"""The library's own errors: what was expected, what came, what to do."""


class FusedMarkovError(Exception):
    """Base of every error this library raises on purpose."""


class ArgumentError(FusedMarkovError, ValueError):
    """An argument has the wrong shape, dtype, device, stride, range or value."""

    def __init__(self, argument: str, expected: str, got: str, remedy: str = "") -> None:
        self.argument, self.expected, self.got, self.remedy = argument, expected, got, remedy
        text = f"{argument}: expected {expected}, got {got}"
        super().__init__(f"{text}; {remedy}" if remedy else text)


class EngineUnavailableError(FusedMarkovError, RuntimeError):
    """The engine asked for cannot run here; the message says why and what can."""

    def __init__(self, engine: str, reason: str, choices: list[str]) -> None:
        self.engine, self.reason, self.choices = engine, reason, choices
        super().__init__(f"engine {engine!r} cannot run: {reason}; usable here: {choices}")


class CheckpointError(FusedMarkovError):
    """A checkpoint file is missing, damaged or does not hold what was asked for."""
