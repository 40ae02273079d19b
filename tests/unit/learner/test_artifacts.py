"""Directories appear whole or not at all, once."""

import hashlib
import os
from pathlib import Path
from uuid import UUID

import pytest

from app.db.repositories.retention import VersionDirectories
from app.rollouts.claimed import Claim, VersionRef
from learner.artifacts import (
    checkpoint_dir,
    publish,
    published,
    sha256_of,
    sweep_unreferenced,
    version_dir,
    version_name,
)
from learner.update_files import sweep_files

UPDATE = UUID(int=5)


def claim_of(head: Path) -> Claim:
    return Claim(
        update_id=UPDATE, policy_id=UUID(int=1), policy_name="p", base_model="/base", settings={},
        head=VersionRef(1, str(head), "0" * 64, head.name), checkpoint_update_id=None, updates_done=1,
        reward_min=-1.0, reward_max=1.0, rollouts=(),
    )  # fmt: skip


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    assert version_dir(tmp_path, "default", 3, UPDATE) == tmp_path / "default" / "versions" / f"default-v3-{UPDATE}"
    assert version_name("default", 3, UPDATE) == f"default-v3-{UPDATE}"
    assert checkpoint_dir(tmp_path, "default", UPDATE) == tmp_path / "default" / "checkpoints" / str(UPDATE)


def test_published_shows_nothing_before_the_end(tmp_path: Path) -> None:
    final = tmp_path / "a" / "thing"
    with published(final) as temporary:
        (temporary / "file").write_text("x")
        assert not final.exists()
        assert temporary.name.startswith(".tmp-")
    assert (final / "file").read_text() == "x"
    assert [p.name for p in final.parent.iterdir()] == ["thing"]


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with published(tmp_path / "thing") as temporary:
            (temporary / "file").write_text("x")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, "older"])
def test_a_path_is_never_used_twice(tmp_path: Path, content: str | None) -> None:
    final = tmp_path / "thing"
    final.mkdir()
    if content is not None:
        (final / "file").write_text(content)
    temporary = tmp_path / ".tmp-thing"
    temporary.mkdir()
    (temporary / "file").write_text("newer")
    with pytest.raises(FileExistsError, match="never used twice"):
        publish(temporary, final)
    assert [p.read_text() for p in final.iterdir()] == ([content] if content else [])


def test_sha256_covers_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two").write_bytes(b"22")
    (tmp_path / "a").write_bytes(b"1")
    expected = hashlib.sha256()
    for part in (b"a", b"1", b"b/two", b"22"):
        expected.update(len(part).to_bytes(8, "big") + part)
    assert sha256_of(tmp_path) == expected.hexdigest()
    (tmp_path / "a").rename(tmp_path / "c")
    assert sha256_of(tmp_path) != expected.hexdigest()


def test_sweep_spares_the_referenced_and_the_young(tmp_path: Path) -> None:
    for name in ("kept", "old", ".tmp-crashed", "young"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    for name in ("kept", "old", ".tmp-crashed"):
        os.utime(tmp_path / name, (1_000, 1_000))
    swept = sweep_unreferenced(tmp_path, keep=["kept"], older_than_s=3600)
    assert {p.name for p in swept} == {"old", ".tmp-crashed"}
    assert {p.name for p in tmp_path.iterdir()} == {"kept", "young"}
    assert sweep_unreferenced(tmp_path / "absent", keep=[], older_than_s=0) == []


def test_versions_are_known_by_name_wherever_the_home_lies_now(tmp_path: Path) -> None:
    for name in ("versions/p-v0", "versions/p-v1", "versions/crashed", f"checkpoints/{UPDATE}"):
        (tmp_path / "p" / name).mkdir(parents=True)
        os.utime(tmp_path / "p" / name, (1_000, 1_000))
    versions = tmp_path / "p" / "versions"
    claim = claim_of(Path("/old/p/versions/p-v1"))
    kept = frozenset({"p-v0", "p-v1"})
    with pytest.raises(FileNotFoundError, match="p-v2"):
        sweep_files(claim, VersionDirectories(kept, frozenset({"p-v1", "p-v2"})), tmp_path)
    assert len(list(versions.iterdir())) == 3
    sweep_files(claim, VersionDirectories(kept, frozenset({"p-v1"})), tmp_path)
    assert sorted(path.name for path in versions.iterdir()) == ["p-v0", "p-v1"]


def test_sha256_of_a_file_of_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    whole = sha256_of(tmp_path)
    monkeypatch.setattr("learner.artifacts.PIECE", 4)
    assert sha256_of(tmp_path) == whole
