"""The report of a diagnosis as a page: each metric's picture, the cut of each rule, and how far to trust it."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd

from fl_core.errors import RunError, UsageError, listing

from .plots.page import Page, album
from .report import Report
from .select import RULES, select


def cuts(report: Report, metric: str) -> pd.DataFrame:
    """Return the plan that each rule would name from a metric, a line a rule.

    Rules that take the user's names are left out.

    Returns:
        Columns ``rule``, ``shared`` and ``trust``. ``shared`` has the shared layers in
        words, ``none``, or ``no plan``. ``trust`` is the benchmark's sentence on the
        rule, or why there is no plan.
    """
    lines = []
    for name, rule in RULES.members().items():
        if not rule.decides:
            continue
        try:
            plan = select(report, name, metric=metric)
        except (RunError, UsageError) as error:
            lines.append((name, "no plan", str(error)))
        except Exception as error:  # a rule from outside may raise anything
            error_type = type(error).__name__
            lines.append((name, "no plan", f"{error_type}: {error}"))
        else:
            sentence = str(plan.why.detail.get("benchmark", ""))
            shared = listing(report.labels[layer] for layer in plan.shared)
            lines.append((name, shared or "none", sentence))
    return pd.DataFrame(lines, columns=["rule", "shared", "trust"])


def report_page(report: Report, title: str = "Diagnosis") -> Page:
    """Return a page with the picture of each metric and the cuts of all rules beneath it.

    >>> import fedlayers as fl
    >>> report = fl.measure.diagnose_task(fl.assemble(fl.RunConfig(dataset="heart")), ["federation_sensitivity"])
    >>> "fc1 by sensitivity_ratio" in report_page(report).html()
    True

    A metric without a picture has the reason in its place.

    Args:
        report: the report.
        title: title of the page.

    Raises:
        UsageError: a picture has several values for one place, such as those of several seeds.
    """
    page = Page(title, report.summary().lead)
    for metric in dict.fromkeys(report.frame["metric"]):
        try:
            pictures = album(report.table, [metric])
        except UsageError as error:  # of a metric without a picture
            page.text(f"## {metric}\n\n{error}")
            continue
        page.text(f"## {metric}")
        for name, draw in pictures.items():
            figure = draw()
            page.figure(figure, name.replace("_", " "))
            plt.close(figure)
        points = []
        for line in cuts(report, metric).itertuples():
            sentence = f"No plan by {line.rule}. {line.trust}"
            if line.shared != "no plan":
                sentence = f"Share {line.shared} by {line.rule}. {line.trust}"
            points.append(sentence.strip())
        page.points(points)
    return page
