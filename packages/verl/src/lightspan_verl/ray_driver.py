"""What drives verl's ranks in a Ray cluster, in verl's environment: `steward SOCKET`.

Its standard input is its lifeline, as a rank's is: when the trainer has ended, so does this, at
once, with the cluster that it started, or its ranks in another one. It knows nothing of what is
ordered and answered, and hands both on as they are.
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
from lightspan_verl.framing import hold_lifeline, receive, send
from lightspan_verl.ray_group import Group
from lightspan_verl.rpc import Failure, Ready, assemblies, packed, rounds


def main(arguments: Sequence[str]) -> None:
    """Serve the trainer until this process is no longer wanted."""
    threading.Thread(
        target=hold_lifeline, args=[_end_cluster], name="lightspan-lifeline", daemon=True
    ).start()
    link = socket.socket(fileno=int(arguments[0]))
    wanted = receive(link)
    if wanted is None:
        return
    try:
        group = Group(assemblies.decode(wanted))
    except LightspanError as error:
        send(link, packed(Ready(failure=Failure.of(error))))
        return
    send(link, packed(group.roll))
    while (data := receive(link)) is not None:
        send(link, packed(group.exchange(rounds.decode(data))))
    group.leave()


def _end_cluster() -> None:
    """End what this process has started, at once: Ray's agents would take a minute or two to see
    that nobody is left. Of a cluster of others nothing is a child of this process."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: what is left of a cluster ends with this process
    os._exit(0)  # the lifeline's thread, which reads, would not let an interpreter end in order
