"""A secure sum: the server receives the weighted sum of the clients' updates, and no single one.

The protocol is that of Bonawitz et al. ("Practical Secure Aggregation for Privacy-Preserving Machine Learning", 2017)
against an active server. Each exchange has five steps: signed keys, shares of secrets, masked updates, signatures of
who is in the sum, and shares that remove masks.

The modules :mod:`.fixed_point`, :mod:`.shamir`, :mod:`.keys` and :mod:`.members` have no transport. :mod:`.at_site` and
:mod:`.at_server` connect them to the messages of a federation. They need the package ``cryptography`` from the extra
``flower``. They are imported only for runs with a secure sum.
"""

from importlib.util import find_spec

from fl_core.errors import needs_package


def require() -> None:
    """Check that ``cryptography`` is installed, before modules that need it are imported.

    Raises:
        UsageError: it is not; gives the command that installs it.
    """
    if find_spec("cryptography") is None:
        raise needs_package("cryptography", "sum securely", "flower")
