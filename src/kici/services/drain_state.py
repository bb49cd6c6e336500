"""Whether this coordinator takes on new work.  In memory: a restart resumes."""


class DrainState:
    def __init__(self) -> None:
        self.draining = False
        self.stopping = False
        """Set when shutdown began: no scale request, no claim, no grace from then on."""

    @property
    def closed(self) -> bool:
        return self.draining or self.stopping
