"""Main module of the driver of verl's ranks in a Ray cluster: `ray_driver SOCKET`.

Runs in verl's environment. The process exits when its standard input is closed, so also when the
trainer is killed, and ends the cluster that it started, or its ranks in another one. It forwards
encoded orders and answers unchanged.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Sequence

import psutil

from lightspan.errors import LightspanError
from lightspan_verl.framing import exit_with_parent, receive, send
from lightspan_verl.ray_group import Group
from lightspan_verl.rpc import Failure, Ready, broadcast_decoder, packed, setup_decoder


def main(arguments: Sequence[str]) -> None:
    """Serve the trainer until it closes the socket."""
    threading.Thread(
        target=exit_with_parent, args=[_end_cluster], name="lightspan-parent-pipe", daemon=True
    ).start()
    link = socket.socket(fileno=int(arguments[0]))
    setup = receive(link)
    if setup is None:
        return
    try:
        group = Group(setup_decoder.decode(setup))
    except LightspanError as error:
        send(link, packed(Ready(failure=Failure.of(error))))
        return
    send(link, packed(group.ready))
    while (data := receive(link)) is not None:
        send(link, packed(group.exchange(broadcast_decoder.decode(data))))
    group.leave()


def _end_cluster() -> None:
    """Kill all child processes: Ray's agents would take a minute or two to exit by themselves.

    Processes of a cluster that was joined are no children of this process.
    """
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the rest of a started cluster ends with this process
    os._exit(0)  # the thread that reads standard input would block a normal exit
