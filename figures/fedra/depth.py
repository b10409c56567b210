"""Clients of unequal depth on PACS's four styles, from a small transformer pretrained on Tiny-ImageNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import save

from diagnostics.plots.drawing import MEAN
from figures import items, page
from figures.differences import EVALUATIONS, settled
from figures.drawing import enumeration
from figures.forms import Kind, Line, curves, key_above, marks, sheet
from figures.items import Drawing, Finding, Item
from figures.names import title
from figures.page import markdown, missing_runs, numbers
from figures.recipe import labels, tested, trained, where
from figures.verdicts import LEVEL, MARGIN, judged, little_learned
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.run import runner
from fl_core.storage import write_atomically
from fl_core.tree import Tree

NAME = "algorithms.pacs_depth"
PRETRAINING, WEIGHTS = "pretraining", "start.safetensors"
HELD, BLOCKS = "held", "blocks_held"
CLASSES, DOMAINNET = 7, 100
"""Of PACS, and those of DomainNet that the paper uses."""
DEPTHS = (12, 10, 6, 4)
"""Blocks that the four clients can hold: FedRA's 12, 10, 8, 6, 4, 3 without two."""
STEPS = (3, 6, 9, 12)
"""Random blocks of 12 that every client trains, of the paper's Fig. 4."""

VIT: dict[str, Any] = {"depth": 12, "embed_dim": 96, "num_heads": 3}
MODEL = "timm:vit_tiny_patch16_224"
PRETRAIN = RunConfig(
    dataset="tiny_imagenet32", partition="iid", clients=1, model=MODEL, model_options={**VIT, "patch_size": 8},
    rounds=15, epochs=1, batch_size=128, lr=1e-3, optimizer="adamw", amsgrad=False, weight_decay=0.05,
    keep_optimizer=False, eval_every=5, checkpoint_every=15,
)  # fmt: skip
"""Patches of 8 of 32 pixels, the same 16 patches as 16 of PACS's 64."""
PACS = RunConfig(
    dataset="pacs", model=MODEL, model_options=VIT,
    rounds=30, epochs=1, batch_size=64, lr=0.01, optimizer="sgd", momentum=0.9, weight_decay=1e-5,
    keep_optimizer=False, eval_every=3, checkpoint_every=30,
)  # fmt: skip
"""FedRA's local training, with half its batch, 30 of its 100 rounds and no clipping of gradients; a client a style."""


def recipes() -> dict[str, RunConfig]:
    """Return the pretraining, the algorithms at unequal depth, and FedRA with equally many blocks for everyone.

    InclusiveFL and DepthFL also run ``plain``, nearer to FedRA's comparison. InclusiveFL then has no momentum
    distillation. DepthFL predicts by its last head and weights clients by samples.
    """
    limited = {"depths": DEPTHS}

    def of(algorithm: str, **options: Any) -> RunConfig:
        return PACS.with_keys(algorithm=algorithm, options=options)

    return {
        PRETRAINING: PRETRAIN,
        "alllarge": of("alllarge"),
        "fedra": of("fedra", **limited),
        "fedra_cover": of("fedra", allocation="cover", **limited),
        "inclusivefl": of("inclusivefl", **limited),
        "depthfl": of("depthfl", **limited),
        "allsmall": of("allsmall"),
        "inclusivefl_plain": of("inclusivefl", momentum=False, **limited),
        "depthfl_plain": of("depthfl", ensemble=False, weighted=True, **limited),
        **{f"fedra_{k}": of("fedra", depths=(k,)) for k in STEPS},
    }


RUNS = recipes()
SAME = {f"fedra_{k}": k for k in STEPS}
NOTE = """± is half the 95 % interval over seeds. Published: ViT in FedRA's Table 1, mean of six domains.

InclusiveFL has its momentum distillation. DepthFL predicts by the mean of its heads and counts clients alike. It also
distils between heads. The weight of that grows over 300 rounds and has hardly begun after 30. Both have one last layer
for clients of all depths, as in FedRA. The methods named `plain` are nearer to FedRA's comparison. InclusiveFL then has
no momentum, as in FedRA's released code. DepthFL then predicts by the last head, as in that code. Its clients are
weighted by samples, as in the text. Images are normalised by ImageNet's statistics. Images of the pretraining are
normalised by Tiny-ImageNet's, whose deviations are a fifth larger."""
TITLES = {"domainnet": "DomainNet", "nico++": "NICO++"}


# --- what they start from --------------------------------------------------------------------------------------


def doubled(model: Tree, classes: int) -> Tree:
    """Return a transformer's weights adapted to images of twice the side, with a new last layer of zeros.

    The patches' kernel is stretched to twice its side and divided by 4. Patches of a large image then equal the patches
    of its 2 x 2 means.
    """
    kernel = model["patch_embed.proj.weight"]
    stretched_kernel = (
        kernel.repeat_interleave(2, dim=-1).repeat_interleave(2, dim=-2) / 4
    )
    head_tensors = {
        "head.weight": torch.zeros(classes, model["head.weight"].shape[1]),
        "head.bias": torch.zeros(classes),
    }
    return {**model, "patch_embed.proj.weight": stretched_kernel, **head_tensors}


def pretrained(task: runner.Task, folder: Path) -> pd.DataFrame:
    """Pretrain, store the weights in the folder, and return the run's rows."""
    engine, frame = trained(task)
    trained_tensors = engine.server.trees["model"]
    write_atomically(
        folder / WEIGHTS,
        save({k: v.contiguous() for k, v in doubled(trained_tensors, CLASSES).items()}),
    )
    return frame


def prepared(
    pretraining: RunConfig, config: RunConfig, run: str, folder: Path
) -> RunConfig:
    """Make a run start from the pretrained weights in the folder, pretraining first if they are not there."""
    if run == PRETRAINING:
        return config
    if not (folder / WEIGHTS).is_file():
        pretrained(
            runner.assemble(
                pretraining.with_keys(seed=0, data_root=config.data.data_root)
            ),
            folder,
        )
    return config.with_keys(init=str(folder / WEIGHTS))


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record each style's accuracy over the rounds, and how many blocks its client held at most."""
    frame = pretrained(task, folder) if run == PRETRAINING else trained(task)[1]
    accuracy_rows = tested(frame)
    accuracy_rows = accuracy_rows[accuracy_rows["model"] == "global"]
    held_rows = where(frame, metric=HELD, value=1)
    block_rows = held_rows.assign(
        block=held_rows["layer"].str.extract(r"blocks\.(\d+)", expand=False)
    ).dropna(subset="block")
    block_counts = (
        block_rows.groupby(["client", "round"])["block"]
        .nunique()
        .groupby("client")
        .max()
    )
    count_rows = [rows.row(BLOCKS, int(block_count), client=str(client), estimator="most over rounds", **labels(task))
            for client, block_count in block_counts.items()]  # fmt: skip
    if count_rows:
        return pd.concat([accuracy_rows, rows.frame(count_rows)], ignore_index=True)
    return accuracy_rows


# --- drawing ---------------------------------------------------------------------------------------------------


def accuracies(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy of the last three evaluations, (run, style) x seeds."""
    accuracy_rows = frame[
        (frame["metric"] == "accuracy")
        & (frame["run"] != PRETRAINING)
        & (frame["round"] > 0)
    ]
    is_late = (
        accuracy_rows["round"]
        .groupby([accuracy_rows["run"], accuracy_rows["seed"]])
        .rank(method="dense", ascending=False)
        <= EVALUATIONS
    )
    return (
        accuracy_rows[is_late]
        .groupby(["run", "client", "seed"], sort=False)["value"]
        .mean()
        .unstack("seed")
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    final_accuracies = accuracies(frame)
    run_means = final_accuracies.groupby("run", sort=False).mean()
    compared_runs = [run for run in run_means.index if run not in SAME]
    styles = list(final_accuracies.index.get_level_values("client").unique())
    style_means = (
        final_accuracies.mean(axis=1).unstack("client").loc[compared_runs, styles]
    )
    kinds = [
        Kind(style_means[[style]].set_axis(["value"], axis=1), style.replace("_", " "))
        for style in styles
    ]
    bar_look = {"marker": "|", "markersize": 14, "mew": 2, "color": MEAN}
    kinds.append(Kind(style_means.mean(axis=1).to_frame("value"), look=bar_look))
    with sheet(5.6, 3.4) as figure:
        ax = figure.subplots()
        marks(
            ax, kinds, list(map(title, compared_runs)), factor=100, xlabel="accuracy %"
        )
        key_above(figure, len(styles), panel=ax)
    accuracy_rows = where(frame, run=PRETRAINING, metric="accuracy")
    start_text = (
        " The transformer was pretrained on Tiny-ImageNet at 32 pixels. Its accuracy there is "
        f"{100 * accuracy_rows.loc[accuracy_rows['round'].idxmax(), 'value']:.1f} % of 100 classes."
    )
    depths_text = enumeration(DEPTHS)
    setting_text = described(header)
    missing_text = missing_runs(header)
    caption = (
        "Test accuracy of the global model, the mean of the last three evaluations. A dot is a style and a bar their "
        "mean. "
        f"The clients train at most {depths_text} blocks. There are at most {header['seeds']} seeds. "
        f"{setting_text}{start_text} "
        f"The figure fedra.fig4 shows FedRA with k random blocks for every client.{missing_text}"
    )
    findings = _findings(frame, run_means)
    table = final_accuracies.stack().rename("value").reset_index()
    table = table.rename(columns={"client": "style"})
    return Drawing(figure, table, caption, findings, _page(final_accuracies, run_means))


def described(header: Mapping[str, Any]) -> str:
    config = next(
        run_record["config"]
        for run, run_record in header["runs"].items()
        if run != PRETRAINING
    )
    return (
        f"Each client has one style of PACS. A transformer of 12 blocks (width {VIT['embed_dim']}) trains for "
        f"{config['rounds']} rounds. Its adapters use {config['optimizer'].upper()} with learning rate "
        f"{config['lr']:g}."
    )


def _draw_steps(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    accuracy_curves = _curves(frame)
    curve_lines = [
        Line(curve, f"k = {block_number}")
        for block_number, curve in accuracy_curves.iterrows()
    ]
    with sheet(5.4, 3.6) as figure:
        ax = figure.subplots()
        curves(
            ax,
            curve_lines,
            factor=100,
            xlabel="round",
            ylabel="accuracy %, mean of styles",
        )
        ax.legend(title="blocks of 12", fontsize=6.5)
    setting_text = described(header)
    missing_text = missing_runs(header, SAME)
    caption = (
        "FedRA when every client trains k random blocks of 12. Test accuracy of the global model is the mean of the "
        f"styles, with one seed. {setting_text} The paper shows one client with a part of NICO++ and prints no "
        f"numbers.{missing_text}"
    )
    table = accuracy_curves.stack().rename("accuracy").reset_index()
    return Drawing(
        figure,
        table,
        caption,
        _learns(accuracy_curves, far(accuracies(frame).groupby("run").mean())),
    )


def columns(
    style_scores: pd.DataFrame,
    run_means: pd.DataFrame,
    heading: str = "run",
    title_of: Callable[[str], str] = title,
) -> dict[str, list[Any]]:
    """Return a row for each run in ``run_means``: its seeds, and its accuracy on each style and on average."""
    runs = list(run_means.index)
    return {
        heading: list(map(title_of, runs)),
        "seeds": list(run_means.notna().sum(axis=1)),
        **{
            style: page.means(style_scores, [(run, style) for run in runs])
            for style in style_scores.index.unique(1)
        },
        "mean": page.means(run_means, runs),
    }


def _page(style_scores: pd.DataFrame, run_means: pd.DataFrame) -> str:
    published_scores = (
        items.published_table("fedra", "Table 1", model="vit", client="")
        .rename(columns=TITLES)
        .reindex(run_means.index)
    )
    published_columns = {
        f"{column} (published)": numbers(published_scores[column])
        for column in published_scores
    }
    table_text = markdown({**columns(style_scores, run_means), **published_columns})
    return f"{table_text}\n\n{NOTE}"


def far(run_means: pd.DataFrame, run: str = "alllarge") -> str:
    """Return evidence that an order of methods is not comparable with the paper's; empty without any.

    It is a run's level against the printed one on DomainNet.
    """
    published_accuracies = (
        items.published_table("fedra", "Table 1", model="vit", client="")["domainnet"]
        / 100
    )
    if run not in run_means.index:
        return ""
    levels = {
        title(run): (float(run_means.loc[run].mean()), float(published_accuracies[run]))
    }
    return little_learned(levels, (1 / CLASSES, 1 / DOMAINNET))


def lead(upper_run: str, lower_run: str) -> float:
    """Return a printed lead on DomainNet as a share; NaN where the paper has not both."""
    published_scores = items.published_table("fedra", "Table 1", model="vit", client="")
    published_pair = published_scores["domainnet"].reindex([upper_run, lower_run]) / 100
    return float(published_pair[upper_run] - published_pair[lower_run])


def _findings(frame: pd.DataFrame, run_means: pd.DataFrame) -> tuple[Finding, ...]:
    accuracy_rows = frame[
        (frame["metric"] == "accuracy") & (frame["run"] != PRETRAINING)
    ]
    accuracy_curves = (
        accuracy_rows.groupby(["run", "round", "seed"])["value"].mean().unstack("seed")
    )
    findings = []
    for upper_run, lower_run in (
        ("alllarge", "fedra"),
        ("fedra", "inclusivefl"),
        ("fedra", "depthfl"),
        ("fedra", "inclusivefl_plain"),
        ("fedra", "depthfl_plain"),
        ("inclusivefl", "allsmall"),
        ("depthfl", "allsmall"),
    ):
        lead_gap = settled(
            accuracy_curves, upper_run, lower_run, printed=lead(upper_run, lower_run)
        )
        upper_title, lower_title = title(upper_run), title(lower_run)
        expected = f"{upper_title} lies above {lower_title}, as on DomainNet and NICO++"
        verdict = judged({"points": lead_gap})
        findings.append(verdict.finding(expected, reason=far(run_means)))
    gap = settled(accuracy_curves, "fedra", "fedra_cover")
    findings.append(
        judged({"keep - cover, points": gap}, LEVEL).finding(
            f"FedRA's two allocations are level within {100 * MARGIN:g} point here, where one client holds every "
            "block and they differ by their draws alone",
            reason=far(run_means),
        )
    )
    most_blocks = (
        frame[frame["metric"] == BLOCKS]
        .groupby(["run", "client"], sort=False)["value"]
        .max()
    )
    clients = list(accuracy_rows["client"].unique())  # in the order that depths follow
    most_blocks = most_blocks.reindex(clients, level="client")
    too_deep_runs = [
        run
        for (run, client), block_count in most_blocks.items()
        if block_count > SAME.get(run, DEPTHS[clients.index(client)])
    ]
    run_texts = []
    for run, client_blocks in most_blocks.groupby("run", sort=False):
        run_title, blocks_text = (
            title(run),
            ", ".join(f"{block_count:g}" for block_count in client_blocks),
        )
        run_texts.append(f"{run_title} {blocks_text}")
    all_text = "; ".join(run_texts)
    findings.append(
        Finding(
            "no client holds more blocks than its depth",
            f"at most {all_text}",
            not too_deep_runs,
        )
    )
    return (*findings, *_learns(_curves(frame), far(run_means)))


def _curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean accuracy over styles if everyone trains k random blocks, k x rounds."""
    accuracy_rows = frame[
        (frame["metric"] == "accuracy") & frame["run"].isin(list(SAME))
    ]
    return (
        accuracy_rows.assign(k=accuracy_rows["run"].map(SAME))
        .groupby(["k", "round"])["value"]
        .mean()
        .unstack("round")
    )


def _learns(curves: pd.DataFrame, reason: str = "") -> tuple[Finding, ...]:
    gains = curves.iloc[:, -1] - curves.iloc[:, 0]
    gains_text = ", ".join(f"k = {k} {100 * gain:+.1f}" for k, gain in gains.items())
    return (
        Finding(
            "FedRA learns with every k",
            f"points gained: {gains_text} (one seed: open)",
            None,
            reason,
        ),
    )


items.register(Item(
    NAME, "Clients of unequal depth on PACS (FedRA)", RUNS, seeds=3, own_seeds=dict.fromkeys((PRETRAINING, *SAME), 1),
    budget="about 5 hours of one core, less of an idle machine; pretraining takes 15 to 76 minutes, a run 2 to 25",
    prepare=partial(prepared, PRETRAIN), measure=_measure, draw=_draw,
))  # fmt: skip
items.register(Item(
    "fedra.fig4", "Accuracy by round where every client trains k random layers, PACS, one seed", source=NAME,
    draw=_draw_steps, seeds=1,
))  # fmt: skip
