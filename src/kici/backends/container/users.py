"""Whom an image runs as, in numbers: what is made for it must be its own."""

from typing import Final

from kici.decide import container_plan as plan
from kici.ports.engine import Engine, EngineRefused

PASSWD_BYTES_MAX: Final = 256 * 1024


async def user_ids_in(engine: Engine, container: str, user: str) -> tuple[int, int]:
    """User and group.  A name is looked up in a container of the image, where it means something.

    Raises `EngineRefused` for a name that nobody there knows.
    """
    if user in ("", "0", "root"):
        return 0, 0
    passwd = await engine.read(container, "/etc/passwd", bytes_max=PASSWD_BYTES_MAX)
    ids = plan.user_ids(user, (passwd or b"").decode(errors="replace"))
    if ids is None:
        raise EngineRefused(f"the image wants to run as {user}, whom its /etc/passwd does not know")
    return ids
