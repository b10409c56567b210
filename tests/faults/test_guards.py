"""Guards behind promises of SECURITY.md: without one, the test that the page names fails."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedlayers.flower import checks
from fl_core import formats, storage
from fl_core.data.preprocessing import MOST_LISTED
from fl_core.run import own_code
from tests.faults.limited import MEGABYTES, SECONDS
from tests.faults.test_bombs import TIMES
from tests.faults.test_matrix import SEEDS
from tests.mutants.running import copied_tree, write

ROOT = Path(__file__).parents[2]
GUARDS = [
    (
        "fl_core/run/exported_model.py",
        '"temperature": TEMPERATURE,',
        '"temperature": NUMBER,',
        "tests/faults/test_forged.py::test_a_description_of_a_model_with_a_number_that_no_fit_gives",
    ),
    (
        "fl_core/data/preprocessing.py",
        "if words and not (is_whole and scaling == (0.0, 1.0)):",
        "if False:",
        "tests/faults/test_forged.py::test_a_preparation_that_scales_words",
    ),
    (
        "fl_core/models/weights.py",
        "if n_negated > sum(data.nbytes for data in storage_tensors.values()):",
        "if False:",
        "tests/faults/test_matrix.py::test_each_reader_meets_each_bomb[weights.pt]",
    ),
    (
        "fl_core/models/weights.py",
        "if visits > VISITS:",
        "if False:",
        "tests/faults/test_strangers.py::test_a_pickle_of_weights",
    ),
    (
        "fl_core/storage.py",
        "if unpacked > max(most_unpacked(), RATIO * packed):",
        "if False:",
        "tests/faults/test_bombs.py::test_a_packed_dataset",
    ),
    (
        "fl_core/models/folders.py",
        "if CODE.fullmatch(name) and not isinstance(value, bool | None):",
        "if False:",
        "tests/fl_core/test_model_folders.py::test_keys_that_load_code_are_refused",
    ),
    (
        "fl_core/models/token_files.py",
        "if process.returncode:",
        "if False:",
        "tests/fl_core/test_token_files.py::test_a_process_that_aborts_is_one_line",
    ),
    (
        "fl_core/models/token_files.py",
        "if path and Path(path).resolve() not in open_folders",
        "if path",
        "tests/faults/test_shadows.py::test_the_process_that_tries_a_tokenizer",
    ),
    (
        "fl_core/rounds/workers.py",
        "{**settings, **SAFE}",
        "settings",
        "tests/faults/test_shadows.py::test_a_worker_process",
    ),
    (
        "fl_core/records/store.py",
        "programs |= dict.fromkeys(",
        "dict.fromkeys(",
        "tests/faults/test_shadows.py::test_the_commit_of_a_stranger_s_repository",
    ),
    (
        "fl_core/records/store.py",
        '"GIT_ALLOW_PROTOCOL": ""',
        '"GIT_ALLOW_NOTHING": ""',
        "tests/faults/test_shadows.py::test_the_commit_of_a_repository_that_would_fetch",
    ),
    (
        "fl_core/storage.py",
        "if sha(data) != digest:",
        "if False:",
        "tests/faults/test_corruption.py::test_any_bit_of_any_covered_file",
    ),
    (
        "fl_core/rows.py",
        "return _SIZES.issuperset(map(type, map(record.__getitem__, _SIZED)))",
        "return True",
        "tests/faults/test_forged.py::test_a_row_that_no_run_writes",
    ),
    (
        "fl_core/run/own_code.py",
        "isinstance(value, int | float) and abs(value) <= _LARGE",
        "isinstance(value, int | float)",
        "tests/faults/test_loading_options.py::test_a_file_chooses_sizes_and_rates_of_own_code_too",
    ),
    (
        "fl_core/run/own_code.py",
        'elif value and _FETCHING & set(key.split("_")):',
        "elif False:",
        "tests/faults/test_loading_options.py::test_a_file_chooses_sizes_and_rates_of_own_code_too",
    ),
    (
        "fl_core/plan.py",
        'if data.get("sha256") != _signature(data) and not plan.is_edited:',
        "if False:",
        "tests/fl_core/test_runner.py::test_a_run_says_that_its_plan_was_edited",
    ),
    (
        "fl_core/storage.py",
        "if match and int(match[1]) != int(number):",
        "if False:",
        "tests/faults/test_foreign.py::test_a_run_of_another_version_is_refused_by_name",
    ),
    (
        "fl_core/display.py",
        "if text.isprintable():",
        "if True:",
        "tests/fedlayers/test_cli.py::test_names_of_others_print_no_control_characters",
    ),
    (
        "fl_core/run/own_code.py",
        "if name not in code:",
        "if False:",
        "tests/fedlayers/test_outside.py::test_a_run_directory_does_not_choose_what_is_imported",
    ),
    (
        "fl_core/records/writing.py",
        "self.folder.write(ROWS, row_data)  #",
        "pass  #",
        "tests/faults/test_kill.py::test_ends_with_the_same_bytes",
    ),
    (
        "fedlayers/flower/checks.py",
        "if reference is not None and tensor.shape != reference.shape:",
        "if False:",
        "tests/faults/test_sites.py::test_forged_replies_are_refused_by_the_site_s_name",
    ),
    (
        "fedlayers/flower/checks.py",
        "if not abs(number) <= LARGEST:",
        "if False:",
        "tests/faults/test_sites.py::test_forged_replies_are_refused_by_the_site_s_name",
    ),
    (
        "fedlayers/flower/checks.py",
        "if texts[name] == commonest:",
        "if True:",
        "tests/faults/test_sites.py::test_forged_replies_are_refused_by_the_site_s_name",
    ),
    (
        "fedlayers/flower/checks.py",
        "if norm <= limit or message is None",
        "if True or message is None",
        "tests/faults/test_sites.py::test_a_lie_that_is_possible_is_noted_and_can_be_clipped",
    ),
    (
        "fl_core/algorithms/fedper.py",
        "if not distinct or min(numbers, default=0.0) < 0:",
        "if False:",
        "tests/faults/test_fuzzed_replies.py::test_each_leaf_of_each_reply[playerfl]",
    ),
    (
        "fedlayers/flower/site.py",
        "if supernode() != STARTED_BY:",
        "if False:",
        "tests/faults/test_sites.py::test_a_child_of_a_killed_supernode_writes_nothing",
    ),
    (
        "fl_core/data/files.py",
        "allow_pickle=False",
        "allow_pickle=True",
        "tests/faults/test_corruption.py::test_a_pickle_in_a_dataset_is_not_executed",
    ),
    (
        "fl_core/data/files.py",
        "formats=FORMATS",
        "formats=None",
        "tests/fl_core/test_data.py::test_an_image_of_another_format_is_not_read",
    ),
    (
        "fl_core/data/files.py",
        "formats.check_scans(storage.read_bytes(file))",
        "pass",
        "tests/faults/test_bombs.py::test_a_jpeg_of_very_many_scans",
    ),
    (
        "fl_core/storage.py",
        "if stat.S_ISLNK(mode):",
        "if False:",
        "tests/faults/test_foreign.py::test_a_link_out_of_the_directory_is_not_followed",
    ),
    (
        "fl_core/storage.py",
        'if not is_file_name(name) or re.search(f"[{CONTROL}]", name):',
        "if False:",
        "tests/faults/test_foreign.py::test_a_name_leads_nowhere_else",
    ),
    (
        "fl_core/records/store.py",
        'if manifest["run"] != self.id:',
        "if False:",
        "tests/faults/test_foreign.py::test_resume_refuses_another_runs_manifest_and_changes_nothing",
    ),
    (
        "fl_core/records/writing.py",
        "if name not in named_files]",
        "]",
        "tests/faults/test_foreign.py::test_only_tensors_that_no_checkpoint_names_are_swept",
    ),
    (
        "fl_core/storage.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "tests/faults/test_lock.py::test_of_two_that_begin_at_once_one_is_refused",
    ),
    (
        "fedlayers/decision/jobs.py",
        'if not (path / "config.json").exists():  # it ended before it was a run',
        "if False:",
        "tests/faults/test_load.py::test_limits_in_a_decision_and_its_export",
    ),
    (
        "fedlayers/flower/checks.py",
        '        if head["stage"] != stage_of(request):',
        "        if False:",
        "tests/faults/test_sites.py::test_a_reply_of_an_earlier_round_is_refused",
    ),
    (
        "fedlayers/flower/clients.py",
        "if not name or is_forged:",
        "if not name:",
        "tests/faults/test_sites.py::test_a_reply_that_comes_again_or_from_another_node_is_left_out",
    ),
    (
        "fl_core/algorithms/fedamp.py",
        "if fault or used_weights.keys() != form.keys():",
        "if fault:",
        "tests/fl_core/test_fedamp.py::test_fedfomos_affinities_add_up",
    ),
    (
        "fedlayers/flower/server_app.py",
        "if not 1 <= value <= maximum:",
        "if False:",
        "tests/faults/test_sites.py::test_numbers_of_a_server_s_file_have_bounds",
    ),
    (
        "fedlayers/flower/site.py",
        'if not re.fullmatch("[0-9a-f]{32,64}", run):',
        "if False:",
        "tests/faults/test_sites.py::test_names_from_a_server_lead_nowhere_else",
    ),
]
"""A guard, what is left without it, and the test that must then fail."""


def test_each_guard_stands_once_and_its_test_is_on_the_page():
    page = (ROOT / "SECURITY.md").read_text() + (
        ROOT / "docs/under_load.md"
    ).read_text()
    named = re.findall(r"`(tests/[^`]+)`", page)
    for file, guard, _, test in GUARDS:
        assert (ROOT / file).read_text().count(guard) == 1, guard
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()
        assert path.startswith("tests/fl_core") or {path, test} & {*named}, test


def test_each_promise_has_a_guard():
    """A row of the page names a test that fails without some guard."""
    page = (ROOT / "SECURITY.md").read_text().partition("## Not promised")[0]
    promises = [line for line in page.splitlines() if "`tests/" in line]
    attacked = {test for *_, test in GUARDS}
    attacked |= {test.partition("::")[0] for test in attacked}
    for line in promises:
        assert attacked & {*re.findall(r"`(tests/[^`]+)`", line)}, line


def test_the_page_has_the_bounds_of_the_code():
    """So has each of its numbers but those of the fuzz, which their own test counts."""
    page = (ROOT / "SECURITY.md").read_text().partition("## Not promised")[0]
    bounds = [
        f"at most {MEGABYTES} MB and {SECONDS} s",
        f"at {TIMES} times the file or {MEGABYTES} MB",
        f"to {storage.RATIO} times their bytes or {storage.UNPACKED / 1e6:.0f} MB",
        f"{storage.UNPACKED_VARIABLE}=6e9",
        f"at most {formats.SCANS} scans",
        f"{len(SEEDS)} drawn files",
        f"sizes of at most {own_code._LARGE:,}",
        f"at most {MOST_LISTED:,} words",
        f"to {checks.CLIP:.0f} times the median norm",
    ]
    for bound in bounds:
        assert page.count(bound) == 1, bound
        page = page.replace(bound, "")
    assert len(re.findall(r"(?<![\w.])[0-9][0-9,]+", page)) == 3


@pytest.fixture(scope="module")
def tree():
    with copied_tree() as copy:
        yield copy


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS, ids=lambda each: f"{each[0]}: {each[1]}")
def test_without_its_guard_the_test_of_a_promise_fails(tree, guard):
    file, old, new, test = guard
    sound = (tree / file).read_text()
    write(tree / file, sound.replace(old, new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0"]
    command += ["-m", "slow or not slow", "-p", "no:cacheprovider", test]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    finally:
        write(tree / file, sound)
    assert done.returncode == 1, done.stdout[-2000:]
    assert "FAILED" in done.stdout
