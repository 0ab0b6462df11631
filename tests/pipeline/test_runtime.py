"""What a start does for the process it lives in."""
import os
import time

from pipeline.runtime import STALE, keep_compiled_operations


def test_a_lock_that_a_killed_compiler_left_is_removed_and_that_of_a_running_one_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name, age in (("old", STALE + 5), ("young", STALE - 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        os.utime(tmp_path / name / "lock", (time.time() - age,) * 2)
    keep_compiled_operations()
    assert not (tmp_path / "old/lock").exists() and (tmp_path / "young/lock").exists()
    assert "left by a process that was killed" in capsys.readouterr().out


def test_compiled_operations_stay_in_the_virtual_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")  # so that the environment is put back afterwards
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    keep_compiled_operations()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "torch_extensions")
