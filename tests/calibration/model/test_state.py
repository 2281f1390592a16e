"""The state of a model: recognised by names, types and shapes, or asked for."""

import numpy as np
import pytest

from requant import RequantError
from requant.calibration.model.session import InputSpec
from requant.calibration.model.state import find_links, possible

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
Shape = tuple[int | str | None, ...]
SAME: Shape = (1, "N", 64)


def specs(text: str, shape: Shape = SAME, dtype: np.dtype[np.generic] = F32) -> list[InputSpec]:
    return [InputSpec(name, dtype, shape) for name in text.split()]


def links(inputs: list[InputSpec], outputs: list[InputSpec]) -> list[str]:
    return [f"{link.output}={link.input}" for link in find_links(None, inputs, outputs)]


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ("x h0", "y hn", "hn=h0"),
        ("x h0 c0", "y hn cn", "hn=h0 cn=c0"),
        ("x h", "y hn", "hn=h"),
        ("x h_0 c_0", "y h_n c_n", "h_n=h_0 c_n=c_0"),
        ("x h_in", "y h_out", "h_out=h_in"),
        ("x in_state", "y out_state", "out_state=in_state"),
        ("input state sr", "output stateN", "stateN=state"),
        ("x cached_key_0 cached_len", "y new_cached_key_0 new_cached_len", None),
        ("audio cache_last_channel", "out cache_last_channel_next", "cache_last_channel_next=cache_last_channel"),
        ("src r1i r2i r3i r4i", "fgr r1o r2o r3o r4o", "r1o=r1i r2o=r2i r3o=r3i r4o=r4i"),
        ("x prev_h", "y h", "h=prev_h"),
        ("x Hidden.In", "y Hidden.Out", "Hidden.Out=Hidden.In"),
        ("ids past_key_values.0.key past_key_values.0.value", "logits present.0.key present.0.value", None),
        ("ids past_key_values.1.decoder.key", "logits present.1.decoder.key", None),
        ("ids past_key_self_0", "logits present_key_self_0", None),
        ("ids past_0 past_1", "logits present_0 present_1", "present_0=past_0 present_1=past_1"),
        ("ids past", "logits present", "present=past"),
        ("x a_in b_in", "y a_out b_out", "a_out=a_in b_out=b_in"),
        ("x cache_in_0 cache_in_1", "y cache_out_0 cache_out_1", "cache_out_0=cache_in_0 cache_out_1=cache_in_1"),
        ("x layer.in.0.h", "y layer.out.0.h", "layer.out.0.h=layer.in.0.h"),
        # no state: the main input and output
        ("x", "y", ""),
        ("input", "output", ""),
        ("x_in", "x_out", ""),
        ("x_in_0", "x_out_0", ""),
        ("sample timestep", "out_sample", ""),
        ("x_in", "x_out score", ""),
        # all pairs fit, but data need an input: only the pair that names a state
        ("x_in h_in", "x_out h_out", "h_out=h_in"),
        ("a_in b_in", "a_out b_out", ""),
        # ambiguous
        ("x h0 h", "y hn", ""),
        ("x h", "y hn h_out", ""),
        ("x h0 h c0", "y hn cn", "cn=c0"),
        # other names
        ("x memory", "y result", ""),
        ("x h0", "y cn", ""),
    ],
)
def test_names_are_recognised(inputs: str, outputs: str, expected: str | None) -> None:
    found = links(specs(inputs), specs(outputs))
    if expected is None:  # all outputs but the first, in the order of the inputs
        expected = " ".join(f"{o}={i}" for o, i in zip(outputs.split()[1:], inputs.split()[1:], strict=True))
    assert " ".join(found) == expected


@pytest.mark.parametrize(
    ("before", "after", "fits"),
    [
        ((1, 64), (1, 64), True),
        ((1, 64), (1, 32), False),
        ((1, 64), (1, 1, 64), False),
        (("N", 4, "past", 16), ("N", 4, "past + sequence", 16), True),
        (("N", 4, "past", 16), ("N", 8, "total", 16), False),
        (("N", 64), (None, None), True),
        ((2, "N", 64), (), True),  # the runtime does not know the shape
    ],
)
def test_shapes_must_fit(before: Shape, after: Shape, fits: bool) -> None:
    found = links([*specs("x"), *specs("h0", before)], [*specs("y"), *specs("hn", after)])
    assert found == (["hn=h0"] if fits else [])


def test_types_must_fit() -> None:
    assert not links([*specs("x"), *specs("h0", SAME)], [*specs("y"), *specs("hn", SAME, I64)])


def test_a_shape_decides_between_two_names() -> None:
    inputs = [*specs("x"), *specs("h0", (1, 8)), *specs("h", (1, 16))]
    assert links(inputs, [*specs("y"), *specs("hn", (1, 16))]) == ["hn=h"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["q=h0"], "no output named 'q'"),
        (["hn=q"], "no input named 'q'"),
        (["hn"], "'hn' is no pair; write OUT=IN, for instance hn=h0, or none"),
        (["last"], "'last' is no pair; write last=i0, or none"),
        (["i0"], "'i0' is no pair; write last=i0, or none"),
        (["y=i0"], r"input 'i0' is float32 \(7,\); only last=i0 fits"),
        (["=h0"], "'=h0' is no pair"),
        ([""], "the state is an empty text"),
        (["y=h0"], r"output 'y' is float32 \(1, 8\), but input 'h0' is float32 \(1, N, 64\)"),
        (["k=h0"], r"output 'k' is int64 \(1, N, 64\), but input 'h0' is float32 \(1, N, 64\)"),
        (["hn=h0, cn=h0"], "input 'h0' is fed by more than one output"),
    ],
)
def test_wrong_requests_are_refused(asked: list[str], message: str) -> None:
    outputs = [*specs("hn cn"), *specs("y", (1, 8)), *specs("k", SAME, I64), *specs("last", (7,))]
    with pytest.raises(RequantError, match=message):
        find_links(asked, [*specs("x h0 c0"), *specs("i0", (7,))], outputs)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(["cn=h0", "hn=c0"], ["cn=h0", "hn=c0"]), (["cn=h0,hn=c0"], ["cn=h0", "hn=c0"]), (["hn=h0"], ["hn=h0"])],
)
def test_a_request_replaces_what_names_show(asked: list[str], expected: list[str]) -> None:
    found = find_links(asked, specs("x h0 c0"), specs("y hn cn"))
    assert [f"{link.output}={link.input}" for link in found] == expected


def test_none_turns_it_off() -> None:
    assert find_links(["none"], specs("x h0"), specs("y hn")) == ()


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ({"x": (1, 1, 257), "s": (1, 2, 8)}, {"y": (1, 1, 257), "t": (1, 2, 8)}, ["t=s"]),
        ({"x": (1, 257), "s": (1, 2, 8)}, {"y": (1, 257), "t": ("N", 2, 8)}, ["t=s"]),
        ({"x": (1, 4), "s": (1, 2, 8), "r": (1, 3)}, {"y": (1, 4), "t": (1, 2, 8), "u": (1, 3)}, ["t=s", "u=r"]),
        # image to image, and what stands first
        ({"x": (1, 3, 8, 8)}, {"y": (1, 3, 8, 8)}, []),
        ({"x": (1, 3, 8, 8), "m": (1, 1, 8, 8)}, {"y": (1, 3, 8, 8)}, []),
        ({"s": (1, 2, 8), "x": (1, 5)}, {"y": (1, 5), "t": (1, 2, 8)}, []),
        # several fit, free axes, no axes, single numbers
        ({"x": (1, 4), "h": (1, 8), "c": (1, 8)}, {"y": (1, 4), "t": (1, 8), "u": (1, 8)}, []),
        ({"x": (1, 8), "s": (1, 8)}, {"y": (1, 4), "t": (1, 8)}, []),
        ({"x": (1, 4), "s": (1, "T", 8)}, {"y": (1, 4), "t": (1, "T", 8)}, []),
        ({"x": (1, 4), "s": (1, 8)}, {"y": (1, 4), "t": ()}, []),
        ({"x": (1, 4), "rate": (1,)}, {"y": (1, 4), "length": (1,)}, []),
        ({"x": (1, 4)}, {}, []),
    ],
)
def test_shapes_suggest_a_state(inputs: dict[str, Shape], outputs: dict[str, Shape], expected: list[str]) -> None:
    sides = [[InputSpec(name, F32, shape) for name, shape in side.items()] for side in (inputs, outputs)]
    assert [f"{link.output}={link.input}" for link in possible(*sides)] == expected


def test_another_type_suggests_no_state() -> None:
    assert possible(specs("x") + specs("s", (1, 8)), specs("y", (1, 4)) + specs("t", (1, 8), I64)) == ()
