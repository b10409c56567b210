"""A site's data, policy, privacy and folder, and the requests that it refuses because of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlayers.remote.audit import Audit
from fedlayers.remote.policy import Policy
from fedlayers.remote.privacy import Account, Privacy
from fedlayers.remote.sent_log import Approval, SentLog
from fedlayers.remote.site_data import SiteData
from fl_core.algorithms.base import ALGORITHMS, find
from fl_core.algorithms.options import configurations
from fl_core.errors import UsageError
from fl_core.limits import data_bytes

if TYPE_CHECKING:
    from fedlayers.remote.secure_sum.keys import Identity


class Host:
    """A site's data, policy and folder, with the checks that these require.

    Args:
        holding: its data. folder: for its states, a folder of its own.
        policy: what it allows; by default all that runs no code of the server's choice.
        device: where it trains.
        privacy: how it hides its data in replies; by default not at all.
        identity: its key, and the other sites' public ones, for runs with a secure sum.
    """

    def __init__(
        self,
        holding: SiteData,
        folder: Path | str,
        policy: Policy | None = None,
        device: str = "cpu",
        privacy: Privacy | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.name, self.holding, self.folder = holding.name, holding, Path(folder)
        self.policy, self.device = policy or Policy(), device
        self.privacy, self.identity = privacy or Privacy(), identity
        self.account = Account(self.privacy, self.folder)
        self.audit = Audit(self.folder, self.policy, holding)
        self.sent, self.approval = SentLog(self.folder), Approval(self.folder)
        self.idle = data_bytes()

    def limit_memory(self) -> AbstractContextManager[None]:
        """Return the policy's limit of this process's memory, for a block that receives a request."""
        return self.policy.limit_memory(self.idle)

    def check_samples(self) -> None:
        """Refuse to take part with fewer samples than the policy requires.

        Raises:
            UsageError: gives their number.
        """
        self.policy.check_samples(sum(self.holding.sizes.values()))

    def check_disk(self) -> None:
        """Refuse new files if all runs take more disk than the policy allows.

        Raises:
            LimitError: gives both sizes.
        """
        self.policy.check_disk(sum(each.lstat().st_size for each in self.folder.rglob("*")))

    def check_algorithm(self, name: str, options: Mapping[str, Any]) -> None:
        """Refuse an algorithm that the policy does not allow, options that it does not take, or what noise takes apart.

        Raises:
            UsageError: names it, and what is allowed.
        """
        self.policy.check_algorithm(name, options)
        algorithms = find(name), find(name).base_algorithm(options)
        if ALGORITHMS.members().get(algorithms[1].name) is algorithms[1]:  # otherwise it is code, which is checked
            self.policy.check_algorithm(algorithms[1].name)
        configurations(algorithms[0], options)
        if self.privacy.active and any(each.keeps_server_pair for each in algorithms):
            raise UsageError(
                f"the algorithm must allow noise in messages; got {name!r}, whose clients keep what they send. "
                "Use another one, such as fedavg or fedprox."
            )
