"""Is a port free, and if not, who has it?"""

import os
import socket
from pathlib import Path

from app.settings import Settings


class PortBusy(RuntimeError):
    """The message says which port, which setting chooses it, and who has it."""


def require_free(host: str, port: int, setting: str) -> None:
    """
    Raises:
        PortBusy: something listens there, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise PortBusy(
                f"EVERGREEN_HOST: {host!r} is no address of this machine ({error.strerror}); use 127.0.0.1, or 0.0.0.0 "
                "for all of them."
            ) from None
        except OSError as error:
            holder = _holder(port)
            by = f" by {holder}" if holder else ""
            raise PortBusy(
                f"port {port} on {host} cannot be used: {error.strerror}{by}. Set {setting} to a free port."
            ) from None


def require_apart(settings: Settings) -> None:
    """
    Raises:
        PortBusy: app and embedded engine are to listen on the same port.
    """
    if not settings.engine_urls and settings.port == settings.engine_port:
        raise PortBusy(
            f"EVERGREEN_PORT and EVERGREEN_ENGINE_PORT are both {settings.port}: app and engine need a port each."
        )


def _holder(port: int) -> str | None:
    """`process 123 (command line)`, as far as /proc tells."""
    inodes = {
        f"socket:[{fields[9]}]"
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for fields in (line.split() for line in Path(table).read_text().splitlines()[1:])
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port  # 0A: listening
    }
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) in inodes for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({command[:100]})"
        except OSError:
            continue  # another user's, or it ended meanwhile
    return None
