"""Under the hood: files and folders whole or not, one process at a time, manifests."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import filelock
import pytest
from fetched import leftovers

from transformer_lib import storage
from transformer_lib.storage import whole_file


def put(path, content, mode="wb"):
    with whole_file(path, mode) as file:
        file.write(content)


def test_a_file_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "x"
    put(path, b"old")

    def fail(*names):
        raise OSError("no")

    with pytest.raises(KeyError), whole_file(path) as file:
        file.write(b"half")
        raise KeyError
    monkeypatch.setattr(storage.os, "replace", fail)
    with pytest.raises(OSError, match="x could not be written .no.; what was there"):
        put(path, b"new")
    assert path.read_bytes() == b"old" and leftovers(tmp_path) == ["x"]


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0, 0o666)])
def test_a_new_file_has_the_mode_that_open_gives(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        put(tmp_path / "ours", b"x")
        (tmp_path / "pythons").write_bytes(b"x")
    finally:
        os.umask(before)
    modes = [(tmp_path / n).stat().st_mode & 0o777 for n in ("ours", "pythons")]
    assert modes == [mode, mode]


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o444, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    path.chmod(mode)
    put(path, "new\n", "w")
    assert path.read_bytes() == b"new\n" and path.stat().st_mode & 0o777 == mode


def test_links_are_followed_and_stay(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x").write_bytes(b"old")
    (tmp_path / "a").symlink_to("deep/x")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "c").symlink_to("deep/not yet there")
    for name in "b", "c":
        put(tmp_path / name, b"new")
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "deep" / "x").read_bytes() == b"new"
    assert sorted(leftovers(tmp_path)) == ["a", "b", "c", "not yet there", "x"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop could not be written"):
        put(tmp_path / "loop", b"new")
    assert (tmp_path / "loop").is_symlink()


def test_no_file_or_link_of_another_is_touched(tmp_path, monkeypatch):
    """The old fixed name, and the random one if somebody guesses it."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "x.part").symlink_to(victim)
    put(tmp_path / "x", b"new")
    monkeypatch.setattr(storage.os, "urandom", bytes)
    (tmp_path / "x.00000000.part").symlink_to(victim)
    with pytest.raises(OSError, match="File exists"):
        put(tmp_path / "x", b"newer")
    assert victim.read_bytes() == b"mine" and (tmp_path / "x").read_bytes() == b"new"
    assert (tmp_path / "x.part").is_symlink()
    assert (tmp_path / "x.00000000.part").is_symlink()


def test_devices_and_pipes_are_written_to(tmp_path):
    put("/dev/null", b"x")
    assert Path("/dev/null").is_char_device()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in "pipe", "link":
        put(tmp_path / name, name, "w")
    assert os.read(reader, 99) == b"pipelink"
    os.close(reader)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]


def test_standard_output_is_appended_to(tmp_path):
    """Also where it is a file: what was printed before and after stays."""
    program = (
        "from transformer_lib.storage import whole_file\n"
        "print('before')\n"
        "for name in '/dev/stdout', '/dev/fd/1':\n"
        "    with whole_file(name, 'w') as file:\n"
        "        file.write(name + '\\n')\n"
        "print('after')\n"
    )
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == ["before", "/dev/stdout", "/dev/fd/1", "after"]


@pytest.mark.parametrize(
    "name, said",
    [
        ("no/such/x", "No such file.*Make its folder first"),
        ("", "it is a folder"),
        ("x" * 300, "too long"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_done(tmp_path, name, said):
    with pytest.raises(OSError, match=f"could not be written.*{said}"):
        with whole_file(tmp_path / name):
            raise AssertionError("too late")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "folder", "said"),
    [
        ("no/x", False, "Make its folder"),
        ("folder", False, "it is a folder"),
        ("file/x", False, "choose another place"),
        ("file", True, "choose another place"),
        ("file/x", True, "choose another place"),
        ("x" * 300, False, "too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_told(tmp_path, name, folder, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(storage.NotWritten, match=f"could not be written.*{said}"):
        storage.ensure_writable(tmp_path / name, folder)
    assert leftovers(tmp_path) == ["file"]


def test_a_place_that_can_be_written_is_left_as_it_is(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    names = sorted(path.name for path in tmp_path.iterdir())
    for name in "file", "link", "pipe", "new":
        storage.ensure_writable(tmp_path / name)
    for name in "", "new", "new/er":
        storage.ensure_writable(tmp_path / name, folder=True)
    storage.ensure_writable("/dev/null")
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks")
@pytest.mark.parametrize("removed", [False, True])
def test_one_at_a_time_holds_a_claim(removed, tmp_path):
    """Also where its holder removes the file while another waits for it."""
    path = tmp_path / "a"
    path.write_text("kept")
    with storage.claimed(path) as first, storage.claimed(path) as second:
        assert first and not second

    def claim():
        with storage.claimed(path, wait=True) as mine:
            got.append(mine and path.exists())

    got, other = [], threading.Thread(target=claim)
    with storage.claimed(path) as again:
        other.start()
        other.join(0.2)
        assert again and not got and path.read_text() == "kept"
        if removed:
            path.unlink()
    other.join(10)
    assert got == [True]


def test_leftovers_are_those_of_the_names_that_were_asked_for(tmp_path):
    own = "a.json.0123abcd.part", "step-000001.x.deadbeef.part"
    for name in (*own, "b.json.0123abcd.part", "a.json.part", "a.json.0123abcz.part"):
        (tmp_path / name).write_text("half")
    (tmp_path / "a.json.01234567.part").mkdir()
    found = storage.leftovers(tmp_path, "a.json", "step-*.x")
    assert [path.name for path in found] == [*own]


def test_a_claim_does_not_follow_a_link(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(storage.NotWritten, match="lock could not be written"):
        with storage.claimed(tmp_path / "lock"):
            pass
    assert not (tmp_path / "other").exists()


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done, sync, move = [], os.fsync, os.replace

    def note(handle):
        done.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    def renamed(old, new):
        done.append("renamed")
        move(old, new)

    monkeypatch.setattr(storage.os, "fsync", note)
    monkeypatch.setattr(storage.os, "replace", renamed)
    put(tmp_path / "x", b"new")
    assert done[0].endswith(".part") and done[1:] == ["renamed", str(tmp_path)]


def test_a_disk_that_is_full_at_the_folder_is_said(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(storage.NotWritten, match="No space left on device.*Free some"):
        put(tmp_path / "x", b"new")
    with pytest.raises(OSError, match="No space left"):
        storage.sync(tmp_path)


def test_the_file_before_can_be_kept(tmp_path):
    for text in "one", "two", "three":
        with storage.whole_file(tmp_path / "x", "w", keep=tmp_path / "y") as file:
            file.write(text)
    assert [(tmp_path / n).read_text() for n in "xy"] == ["three", "two"]
    assert leftovers(tmp_path) == ["x", "y"]


@pytest.mark.skipif(os.name != "posix", reason="needs locks on folders")
def test_one_at_a_time_holds_a_folder(tmp_path):
    """One that is not there is not made, and nothing is left in it."""
    with storage.claimed(tmp_path, folder=True) as first:
        with storage.claimed(tmp_path, folder=True) as second:
            assert first and not second
    with pytest.raises(storage.NotWritten, match="No such file"):
        with storage.claimed(tmp_path / "gone", folder=True):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", [False, True])
def test_where_a_disk_has_no_locks_everybody_gets_it(folder, tmp_path, monkeypatch):
    def none(handle, blocking):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock, "lock_descriptor", none)
    path = tmp_path if folder else tmp_path / "lock"
    with storage.claimed(path, folder=folder) as one:
        with storage.claimed(path, wait=True, folder=folder) as two:
            assert one and two


def test_the_lock_is_the_one_of_filelock(tmp_path):
    """Other programs that lock the same file wait, too."""
    path = tmp_path / "lock"
    with storage.claimed(path), pytest.raises(filelock.Timeout):
        filelock.FileLock(path, timeout=0).acquire()
    with filelock.FileLock(path), storage.claimed(path) as mine:
        assert not mine


def manifest(folder, **about):
    for name in "a", "b/c":
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    storage.write_manifest(folder, about=about)
    return folder / "manifest.json"


@pytest.mark.parametrize("about", [{}, {"pairs": 3}])
def test_a_manifest_names_what_is_wrong(about, tmp_path):
    manifest(tmp_path, **about)
    table = storage.read_manifest(tmp_path, needed=["a"])
    assert set(table["files"]) == {"a", "b/c"} and table.items() >= about.items()
    (tmp_path / "b" / "c").write_text("x/y")
    storage.read_manifest(tmp_path, verify=False)  # of the same size
    with pytest.raises(storage.DamagedFile, match="c is damaged: its SHA-256.*Copy"):
        storage.read_manifest(tmp_path)
    (tmp_path / "a").unlink()
    with pytest.raises(storage.DamagedFile, match="a is missing .2 such files.. Mend"):
        storage.read_manifest(tmp_path, cure="Mend it.")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"pairs": 3', '"pairs": 4'), ('"pairs": 3,', ""), ('"checksum"', '"sum"')],
)
def test_what_a_manifest_says_besides_cannot_change(old, new, tmp_path):
    path = manifest(tmp_path, pairs=3)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(storage.DamagedFile, match="manifest.json is damaged"):
        storage.read_manifest(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(storage.DamagedFile, match="has no manifest.json"):
        storage.read_manifest(tmp_path)
    manifest(tmp_path)
    with pytest.raises(storage.DamagedFile, match="manifest.json is damaged"):
        storage.read_manifest(tmp_path, needed=["recipe.json"])


@pytest.mark.parametrize("locked", ["manifest.json", "weights"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(
    tmp_path, monkeypatch, locked
):
    put(tmp_path / "weights", b"1 2 3")
    storage.write_manifest(tmp_path)
    assert storage.read_manifest(tmp_path, ["weights"])

    def guarded(real):
        def read(path, *args, **kwargs):
            if Path(path).name == locked:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        return read

    monkeypatch.setattr(storage, "open", guarded(open), raising=False)
    monkeypatch.setattr(Path, "read_text", guarded(Path.read_text))
    with pytest.raises(PermissionError, match=f"{tmp_path / locked}"):
        storage.read_manifest(tmp_path, ["weights"])
