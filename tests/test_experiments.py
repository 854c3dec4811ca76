"""The scripts of single experiments, and the records that they say they write."""

import fnmatch
import json
import re
import subprocess
from pathlib import Path

import pytest
import queue_runs
import records

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path.relative_to(records.EVIDENCE).as_posix()
    for path in records.EVIDENCE.rglob("*.json")
)


def test_the_table_of_records_is_that_of_the_scripts():
    text = records.README.read_text("utf-8")
    assert records.table() in text, "python experiments/records.py --write"
    assert text == records.with_table(text)


@pytest.mark.parametrize("name", FILES)
def test_one_script_says_that_it_writes_a_record(name):
    """And the record, where it has its command, names the same one."""
    found = [(p, w) for p, w in records.writers() if fnmatch.fnmatch(name, p)]
    assert len(found) == 1, found
    ((_, writer),) = found
    command = json.loads((records.EVIDENCE / name).read_text("utf-8")).get("command")
    if command and "python -c" not in command:
        # One of an earlier commit says where the script was then.
        (script,) = re.findall(r"[\w/]+\.py", command)
        assert Path(script).name == Path(writer).name


def test_a_pattern_of_records_has_a_record_or_a_group_that_will_write_one():
    for pattern, writer in records.writers():
        group = re.fullmatch(r"results/([\w-]+)/\*\.json", pattern)
        called = records.groups().get(group[1]) if group else None
        assert called or fnmatch.filter(FILES, pattern), pattern
        assert not called or {*called} == {writer}, (pattern, called)


def test_every_group_of_the_queue_calls_what_is_there():
    for called in (one for each in records.groups().values() for one in each):
        assert called.startswith("transformer-lib ") or (ROOT / called).is_file()


def test_a_script_that_names_no_record_is_noticed(tmp_path):
    script = tmp_path / "odd.py"
    script.write_text('"""Measure something."""\n')
    with pytest.raises(ValueError, match="does not end with its record"):
        records.named_by(script)
    script.write_text('"""Measure.\n\nRecord: a.json,\nresults/b/*.json\n"""\n')
    assert records.named_by(script) == ["a.json", "results/b/*.json"]


QUEUE = """
[[group]]
name = "moved"
run = "first"
command = "%s/step.py {runs}/made.json"
result = "{runs}/made.json"
"""


def test_a_pinned_group_goes_on_where_its_scripts_were(tmp_path, monkeypatch):
    """Its first run began at a commit at which the script had another place."""
    repository, runs = tmp_path / "repository", tmp_path / "runs"
    queue = repository / queue_runs.QUEUE.relative_to(queue_runs.ROOT)
    queue.parent.mkdir(parents=True)
    runs.mkdir()

    def git(*words):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(repository), *identity, *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    for place in ("old", "new"):
        (repository / place).mkdir()
        (repository / place / "step.py").write_text(
            f"import sys\nopen(sys.argv[1], 'w').write('{{\"place\": \"{place}\"}}')\n"
        )
        queue.write_text(QUEUE % place)
        git("add", ".")
        git("commit", "-q", "-m", place)
        if place == "old":
            (runs / "moved.commit").write_text(git("rev-parse", "HEAD"))
            git("rm", "-rq", "old")
    monkeypatch.setattr(queue_runs, "ROOT", repository)
    monkeypatch.setattr(queue_runs, "QUEUE", queue)
    monkeypatch.setattr(queue_runs, "KEPT", tmp_path / "kept")
    jobs = queue_runs.read_jobs(queue, runs, "cpu", [])
    assert jobs[0].command[0] == "new/step.py"
    queue_runs.Queue(jobs, runs, 1, "cpu", here=False).work()
    (kept,) = (tmp_path / "kept" / "moved").iterdir()
    assert json.loads(kept.read_text("utf-8")) == {"place": "old"}
