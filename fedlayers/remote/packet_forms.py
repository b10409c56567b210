"""The entries of each packet of the protocol, with their types.

A form is a schema of :mod:`fl_core.storage.schema`. :mod:`fedlayers.remote.protocol` says what each packet does.
"""

from __future__ import annotations

from fl_core.storage.schema import COUNT, MapOf

STAMP = {"session": str, "seq": COUNT}
WORK = ("train", "finetune", "score")
NUMBER = (float, int)
PLACE = {"run": str, "lane": str, "algorithm": str, "options": dict, "plan": (dict, None), "from": str}
ROUND = {"index": COUNT, "exchange": str, "sampled": [COUNT]}
MODELS = {**PLACE, "done": COUNT, "models": (dict, None), "meta": dict}
FORMS = {
    "train": {
        **PLACE,
        "to": str,
        "saved": str,
        "round": ROUND,
        "meta": dict,
        "score": [str],
        "keep": bool,
        "lost": bool,
    },
    "finetune": {**MODELS, "model": str},
    "score": MODELS,
}
HELLO = {"version": str, "protocol": COUNT, "oldest": COUNT}
MOMENTS = {"number": COUNT, "seed": COUNT}
TOLD = {"count": COUNT, "present": [COUNT], "mean": [NUMBER], "squares": [NUMBER]}
RACE = {"number": COUNT, "seed": COUNT, "arms": [{"algorithm": str, "options": dict, "layers": [str]}]}
COUNTED = {"classes": COUNT}
JOIN = {
    "scaling": (dict, None),
    "run": str,
    "number": COUNT,
    "sites": [{"name": str, "sizes": MapOf(COUNT), "digest": str}],
    "dataset": str,
    "config": dict,
    "plan": (dict, None),
    "model": str,
    "layers": [str],
    "secure_sum": bool,
    "compress": str,
}
OPTIONAL = ("secure_sum", "compress")
"""The entries of a request ``join`` that only runs with a secure sum or with compressed updates have."""
MEASURE = {
    "run": str,
    "metrics": [str],
    "options": dict,
    "measure_batch": COUNT,
    "mode": str,
    "layers": (list, None),
    "null": [str],
    "null_draws": COUNT,
}
MEASURED_HEADER = {
    "layers": [{"name": str}],
    "bytes": MapOf(NUMBER),
    "metrics": MapOf(dict),
    "loss": str,
    "mode": str,
    "by": str,
    "measure_batch": COUNT,
    "pairs": MapOf(str),
}
MEASURED = {"rows": [dict], "nulls": [dict], "header": MEASURED_HEADER}
JOINED = {"sizes": MapOf(COUNT)}
SIZES = {"train": COUNT, "validation": COUNT, "test": COUNT}
FACTS = {
    "dataset": str,
    "scale": str,
    "impute": str,
    "columns": [str],
    "name": str,
    "version": str,
    "torch": str,
    "protocol": COUNT,
    "oldest": COUNT,
    "shape": [COUNT],
    "classes": [str],
    "sizes": SIZES,
    "digest": str,
    "tokens": COUNT,
    "words": (str, None),
    "mean": [NUMBER],
    "std": [NUMBER],
    "images": bool,
}
MOST_SAMPLES = 10**7
"""Samples of one site at most. The server numbers them."""
OUTLINE = {"trees": MapOf([str]), "changed": [str]}
"""The names in a client's state, as JSON."""
REPLY = {
    "meta": dict,
    "work": MapOf(NUMBER),
    "epsilon": (list, None),
    "scores": MapOf(MapOf(MapOf((*NUMBER, None)))),
    "observations": [dict],
    "outline": OUTLINE,
}
SUM = {"run": str, "lane": str, "to": str, "sum": str, "group": [str]}
KEYS = MapOf({"mask": str, "share": str, "signature": str})
SUM_FORMS = {
    "sum_keys": SUM,
    "sum_shares": {**SUM, "keys": KEYS},
    "sum_agree": {**SUM, "survivors": [str]},
    "sum_reveal": {**SUM, "signatures": MapOf(str)},
}
PARTS = {
    "sum_keys": KEYS.form,
    "sum_shares": MapOf(str),
    "sum_agree": {"signature": str},
    "sum_reveal": {"seeds": MapOf(str), "masks": MapOf(str)},
}
"""What a reply ``summed`` has as its parts, by the kind of the request."""
IN_SUM = {"sum": str, "group": [str], "shares": MapOf(str)}
"""What a request ``train`` says of the secure sum that takes the update."""
MASKED = "masked"
"""The tree of a reply with a masked update, as one tensor of whole numbers."""
