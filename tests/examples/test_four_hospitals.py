"""The example of four hospitals in a folder that holds other files, too."""

from examples import four_hospitals
from tests.conftest import refuses


def test_only_what_it_made_is_removed(tmp_path):
    out = tmp_path / "out"
    user_files = [out / "notes.txt", out / "va" / "own.csv"]
    made_files = [
        out / "processes" / "superlink.db",
        out / "fedavg" / "config.json",
        out / "playerfl.toml",
        out / "report.html",
        out / "learning.png",
        *four_hospitals.hospital_files(out).values(),
    ]
    for path in (*user_files, *made_files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    four_hospitals.remove_earlier(out)
    assert [path for path in made_files if path.exists()] == []
    assert all(path.read_text() == "text" for path in user_files)
    assert len(four_hospitals.hospital_files(out)) == 4


def test_another_folder_and_a_link_are_refused_and_stay(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with refuses("hold an earlier federation"):
        four_hospitals.main(tmp_path, 1)
    (tmp_path / "processes").mkdir()
    (tmp_path / "va").symlink_to(tmp_path / "processes")
    with refuses("hold an earlier federation"):
        four_hospitals.main(tmp_path, 1)
    assert (tmp_path / "report.html").read_text() == "mine"
