"""A deprecation is an error: in the tests, in child processes, and in what the runtime logs."""

from __future__ import annotations

import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from requant.calibration.model import session as sessions

SAMPLE = Path(__file__).parent.parent / "sample_models" / "digits.onnx"
KINDS = [DeprecationWarning, PendingDeprecationWarning, FutureWarning]


def warn(kind: type[Warning]) -> None:
    warnings.warn("old", kind, stacklevel=1)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_tests(kind: type[Warning]) -> None:
    with pytest.raises(kind, match="old"):
        warn(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_command(kind: type[Warning]) -> None:
    program = f"import warnings; warnings.warn('old', {kind.__name__})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{kind.__name__}: old" in done.stderr


def test_in_a_worker_of_a_pool() -> None:
    program = "import warnings\ndef f(): warnings.warn('old', DeprecationWarning)"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(exec, "pass").exception() is None
        error = pool.submit(exec, f"{program}\nf()", {}).exception()
    assert isinstance(error, DeprecationWarning)


def test_the_runtime_logs_no_deprecation(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options_of = sessions._session_options

    def talking(*args: object, **kwargs: object) -> object:
        options = options_of(*args, **kwargs)  # type: ignore[arg-type]
        options.log_severity_level = 0
        return options

    monkeypatch.setattr(sessions, "_session_options", talking)
    for lean, arena in ((True, True), (False, False)):
        sessions.open_session(
            SAMPLE, threads=1, profile=tmp_path / "p", save_optimized=tmp_path / "o.onnx", lean=lean, arena=arena
        )
    logged = capfd.readouterr().err
    assert "session" in logged.lower()  # it logs at all
    assert not [line for line in logged.splitlines() if "deprecat" in line.lower()]
