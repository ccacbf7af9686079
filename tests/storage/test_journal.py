from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitup.core import tuning
from splitup.core.errors import ConfigurationError, InvalidInput, Unavailable
from splitup.storage.journal import Journal
from tests.builders import HANG_S

_WAL_HEADER_BYTES, _WAL_FRAME_BYTES = (
    32,
    24 + 4096,
)  # https://www.sqlite.org/fileformat2.html#walformat


def run(source: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_records_come_back_by_kind_and_key(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "data") as journal:
        journal.put("plan", "b", {"n": 1})
        journal.put("plan", "a", {"n": 2})
        journal.put("other", "a", {"list": [1, None, True, "é"]})
        journal.put("plan", "b", {"n": 3})
        assert journal.get("plan", "c") is None
    with Journal.open(tmp_path / "data") as journal:
        assert journal.items("plan") == [("a", {"n": 2}), ("b", {"n": 3})]
        assert journal.get("other", "a") == {"list": [1, None, True, "é"]}
        journal.delete("plan", "a")
        journal.delete("plan", "never")
        assert journal.items("plan") == [("b", {"n": 3})]


def test_a_slot_is_written_once(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        assert journal.put_once("vote", "7", {"root": "a"}) == {"root": "a"}
        assert journal.put_once("vote", "7", {"root": "b"}) == {"root": "a"}
    with Journal.open(tmp_path) as journal:
        assert journal.put_once("vote", "7", {"root": "c"}) == {"root": "a"}


def test_a_slot_is_written_once_by_many_threads(tmp_path: Path) -> None:
    answers: list[dict[str, int]] = []
    with Journal.open(tmp_path) as journal:

        def vote(number: int) -> None:
            answers.append(journal.put_once("vote", "7", {"n": number}))

        threads = [threading.Thread(target=vote, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 8 and len({answer["n"] for answer in answers}) == 1


def test_a_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        with journal.transaction():
            journal.put("k", "1", {})
            journal.put("k", "2", {})
        with pytest.raises(RuntimeError), journal.transaction():
            journal.put("k", "3", {})
            journal.delete("k", "1")
            raise RuntimeError
        with pytest.raises(RuntimeError, match="inner"), journal.transaction():
            journal.put("k", "4", {})
            with journal.transaction():
                raise RuntimeError("inner")
        assert [key for key, _ in journal.items("k")] == ["1", "2"]
        journal.put("k", "5", {})
        assert len(journal.items("k")) == 3


def test_a_failed_inner_transaction_spoils_the_outer_one(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        with journal.transaction():
            journal.put("k", "1", {})
            try:
                with journal.transaction():
                    journal.put("k", "2", {})
                    raise RuntimeError
            except RuntimeError:
                pass
        assert journal.items("k") == []


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        for value in ({"x": 1.5}, {"x": b""}, {"x": 2**60}):
            with pytest.raises(InvalidInput):
                journal.put("k", "1", value)
        with pytest.raises(InvalidInput, match="limit"):
            journal.put("k", "1", {"x": "y" * tuning.MAX_JOURNAL_VALUE_BYTES})
        assert journal.items("k") == []
    with pytest.raises(InvalidInput, match="closed"):
        journal.get("k", "1")


def test_f05_a_second_process_refuses_to_start(tmp_path: Path) -> None:
    holder = run(
        """
        import sys
        from pathlib import Path
        from splitup.storage.journal import Journal
        with Journal.open(Path(sys.argv[1])):
            print("open", flush=True)
            sys.stdin.read()
        """,
        str(tmp_path),
    )
    assert holder.stdout is not None and holder.stdin is not None
    try:
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(ConfigurationError, match=f"process {holder.pid};"):
            Journal.open(tmp_path)
        holder.kill()
        holder.wait()
        Journal.open(tmp_path).close()  # the lock ends with the process that held it
    finally:
        holder.kill()
        holder.communicate()


def test_f05_the_same_process_cannot_open_it_twice(tmp_path: Path) -> None:
    with Journal.open(tmp_path), pytest.raises(ConfigurationError, match=f"process {os.getpid()}"):
        Journal.open(tmp_path)
    Journal.open(tmp_path).close()


def test_everything_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    writer = run(
        """
        import sys
        from pathlib import Path
        from splitup.storage.journal import Journal
        journal = Journal.open(Path(sys.argv[1]))
        for number in range(1_000_000):
            journal.put("n", f"{number:07}", {"n": number, "pad": "x" * 500})
            print(number, flush=True)
        """,
        str(tmp_path),
    )
    assert writer.stdout is not None
    try:
        acknowledged = [int(writer.stdout.readline()) for _ in range(300)]
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read()  # communicate() would miss lines that readline has buffered
        acknowledged += [int(line) for line in rest.splitlines(keepends=True) if b"\n" in line]
    finally:
        writer.kill()
        writer.communicate()
    with Journal.open(tmp_path) as journal:
        stored = [value["n"] for _, value in journal.items("n")]
    assert stored[: len(acknowledged)] == acknowledged
    assert len(stored) <= len(acknowledged) + 1  # one may be unacknowledged


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a journal whose process died with 20 records in the log."""
    live, image = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp("image")
    with Journal.open(live) as journal:
        for number in range(20):
            journal.put("n", f"{number:02}", {"n": number})
        for name in ("journal.sqlite", "journal.sqlite-wal"):
            shutil.copy(live / name, image / name)
    return image


@pytest.mark.parametrize("every", [32, pytest.param(1, marks=pytest.mark.long)])
def test_f23_a_log_torn_at_any_byte_recovers_a_prefix(
    crashed: Path, tmp_path: Path, every: int
) -> None:
    """At bytes of the log's header and of its last frame; elsewhere close to the borders."""
    log = (crashed / "journal.sqlite-wal").read_bytes()
    frames = range(_WAL_HEADER_BYTES, len(log), _WAL_FRAME_BYTES)
    lengths = {*range(_WAL_HEADER_BYTES), *range(frames[-1], len(log) + 1, every)}
    lengths |= {len(log) - 1, len(log)}
    lengths |= {start + shift for start in frames for shift in (-1, 0, 1, 23, 24, 25)}
    memory = Path("/dev/shm")  # thousands of fsyncs take a minute on some disks
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        counts = [count_recovered(crashed, Path(name), log[:n]) for n in sorted(lengths)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 20
    assert counts[-2] == 19  # the last record is there whole, or not at all


def count_recovered(crashed: Path, directory: Path, log: bytes) -> int:
    """Open the journal with a truncated log and use it; return how many records it had."""
    shutil.copy(crashed / "journal.sqlite", directory)
    (directory / "journal.sqlite-wal").write_bytes(log)
    (directory / "journal.sqlite-shm").unlink(missing_ok=True)
    with Journal.open(directory) as journal:
        numbers = [value["n"] for _, value in journal.items("n")]
        assert numbers == list(range(len(numbers)))
        journal.put("after", "1", {})
    return len(numbers)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_f23_a_flipped_byte_is_an_error_or_changes_nothing(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with Journal.open(directory) as journal:
            for number in range(30):
                journal.put("n", f"{number:02}", {"n": number, "pad": "x" * 200})
        path = directory / "journal.sqlite"
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        try:
            with Journal.open(directory) as journal:
                assert journal.items("n") == [
                    (f"{n:02}", {"n": n, "pad": "x" * 200}) for n in range(30)
                ]
        except (ConfigurationError, Unavailable) as error:
            assert str(path) in str(error)


def test_f23_a_schema_that_is_no_text_is_damage(tmp_path: Path) -> None:
    """SQLite quotes the bytes in its message, which then cannot be decoded either."""
    Journal.open(tmp_path).close()
    path = tmp_path / "journal.sqlite"
    content = path.read_bytes()
    for found in (b"records", b"TABLE", b"(", b"TEXT"):
        place = content.index(found)
        path.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        with pytest.raises(ConfigurationError, match="is damaged"):
            Journal.open(tmp_path)


@pytest.mark.parametrize("content", [b"not a database, but long enough to look like one" * 30])
def test_a_foreign_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal.sqlite").write_bytes(content)
    with pytest.raises(ConfigurationError, match="is damaged"):
        Journal.open(tmp_path)
    assert (tmp_path / "journal.sqlite").read_bytes() == content


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "journal.sqlite")
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(ConfigurationError, match="not a journal of this version"):
        Journal.open(tmp_path)


def test_a_changed_record_is_found(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.put("k", "1", {"n": 1})
    connection = sqlite3.connect(tmp_path / "journal.sqlite")
    connection.execute("UPDATE records SET value = ?", (b'{"n":2}',))
    connection.commit()
    connection.close()
    with pytest.raises(ConfigurationError, match="k/1"):
        Journal.open(tmp_path)
    with pytest.raises(ConfigurationError, match="k/1"):
        Journal.open(tmp_path)  # and the lock is free again


def test_a_record_that_changed_its_key_is_found(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.put("k", "1", {"n": 1})
    connection = sqlite3.connect(tmp_path / "journal.sqlite")
    connection.execute("UPDATE records SET key = '2'")
    connection.commit()
    connection.close()
    with pytest.raises(ConfigurationError, match="k/2"):
        Journal.open(tmp_path)


def test_f23_a_full_disk_is_unavailable_and_loses_nothing(tmp_path: Path) -> None:
    """A limit on file size stands for the disk: a write fails half way, as it does there."""
    writer = run(
        """
        import resource, signal, sys
        from pathlib import Path
        from splitup.core.errors import Unavailable
        from splitup.storage.journal import Journal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        journal = Journal.open(Path(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        count = 0
        try:
            while count < 1000:
                journal.put("n", f"{count:04}", {"n": count, "pad": "x" * 2000})
                count += 1
        except Unavailable as error:
            print(count, len(journal.items("n")), error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        journal.put("n", "last", {})
        """,
        str(tmp_path),
    )
    output = writer.communicate(timeout=HANG_S)[0].decode()
    assert writer.returncode == 0
    count, seen, message = output.split(" ", 2)
    assert 10 < int(count) < 1000 and seen == count and "journal.sqlite" in message
    with Journal.open(tmp_path) as journal:
        assert len(journal.items("n")) == int(count) + 1


def test_a12_the_journal_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "data") as journal:
        journal.put("k", "1", {})
        for name in ("journal.sqlite", "journal.sqlite-wal", "lock"):
            assert (tmp_path / "data" / name).stat().st_mode & 0o077 == 0
