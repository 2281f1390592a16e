"""How this machine's kernels add products is found by multiplying."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from requant import RequantError
from requant.quantize.runtime import isa
from requant.quantize.runtime.isa import Isa, detect, probe, resolve
from requant.quantize.runtime.machine import FLAGS, flags


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """A machine does not change, but the one that a test pretends does."""
    detect.cache_clear()
    yield
    detect.cache_clear()


def test_the_runtime_gives_one_of_two_sums() -> None:
    assert probe() in (2 * 255 * 127, 2**15 - 1)


def test_what_is_detected_is_what_the_runtime_computes() -> None:
    assert detect().exact == (probe() == 2 * 255 * 127)


@pytest.mark.skipif(not {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"}.intersection(flags()), reason="no such CPU")
def test_a_cpu_with_dot_products_is_exact() -> None:
    assert detect().exact


@pytest.mark.parametrize(("total", "expected"), [(64770, Isa.VNNI), (32767, Isa.AVX2), (0, Isa.AVX2)])
def test_a_wrong_sum_is_not_exact(total: int, expected: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "probe", lambda: total)
    assert detect() is expected
    assert resolve("auto") is expected


def test_a_machine_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = iter([64770])
    monkeypatch.setattr(isa, "probe", lambda: next(sums))
    assert [detect(), resolve("auto"), detect()] == [Isa.VNNI] * 3


def test_a_named_instruction_set_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "probe", lambda: pytest.fail("probed"))
    assert resolve("vnni") is Isa.VNNI
    assert resolve("avx2") is Isa.AVX2
    assert (Isa.VNNI.exact, Isa.AVX2.exact) == (True, False)
    assert f"{Isa.AVX2}" == "avx2"


@pytest.mark.parametrize("name", ["", "VNNI", "avx512", "sse"])
def test_an_unknown_instruction_set_is_refused(name: str) -> None:
    with pytest.raises(RequantError, match="no instruction set named"):
        resolve(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: x\nflags\t\t: fpu avx2 avx512_vnni amx_int8\n", ("avx2", "avx512_vnni", "amx_int8")),
        ("Features\t: fp asimd asimddp i8mm\n", ("asimddp", "i8mm")),
        ("flags\t\t: fpu avx2\nvmx flags\t: avx_vnni\nbugs\t\t: i8mm\n", ("avx2",)),
        ("", ()),
    ],
    ids=["x86", "arm", "other-lines", "empty"],
)
def test_flags_are_read_from_the_system(text: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert flags(tmp_path / "cpuinfo") == expected


def test_a_system_that_does_not_say_has_no_flags(tmp_path: Path) -> None:
    assert flags(tmp_path / "none") == ()
    assert set(flags()) <= set(FLAGS)
