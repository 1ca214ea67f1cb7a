"""One rank of several, alone on a GPU: its exchanges go to itself, so that the kernel of a rank can be timed there.

Rank 0 stores its part into its slot of every mailbox. Here mailbox p is the rank's own, p slots further on, so what
would reach rank p comes to lie where rank p's part is waited for: every exchange stores, waits, clears and adds as many
bytes as among real ranks, and sums hold the rank's own part once for each of them. What is missing is the link, and the
wait for others. Besides the slots a rank writes a line of progress and the failure word of each mailbox; those of the
others fall into a gap behind each slot. That all others have come is written beforehand.
"""

from dataclasses import replace

import numpy as np

from stepkernel.cuda.device_protocol import Device, Mailboxes
from stepkernel.cuda.plan import Plan
from stepkernel.cuda.step_block import LINE, slots_start

AHEAD = 1 << 62  # an exchange that nobody reaches


def spaced(plan: Plan) -> Plan:
    """The plan with a gap behind each slot that takes what is meant for the heads of others' mailboxes."""
    return replace(plan, slot_bytes=plan.slot_bytes + slots_start(plan.program.shard.size) + LINE)


class Loopback:
    """`device_protocol.Peers` of rank 0 of a plan that is `spaced`."""

    rank = 0

    def __init__(self, plan: Plan, device: Device) -> None:
        self.size = plan.program.shard.size
        self._device, self._slot_bytes = device, plan.slot_bytes

    def mailboxes(self, size: int, multicast: bool) -> Mailboxes:
        """Raises ValueError for multicast: one store would have to reach all places."""
        if multicast:
            raise ValueError("a rank alone: exchanges by NVLink multicast cannot go to itself")
        own = self._device.zeros("mailbox", size)
        for other in range(1, self.size):
            self._device.write(own + LINE * (1 + other), np.array([AHEAD], np.int64))
        return Mailboxes([own + other * self._slot_bytes for other in range(self.size)])
