"""What an operator divides by stays float: a value that uint8 rounds to 0 would make its result infinite."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.forms import native_plan, possible_forms
from requant.quantize.placement.rules import choose_by
from requant.transforms.int8.plan import Impl

from .test_rules import between, impls, reason

CONSTANTS: dict[str, np.ndarray] = {
    "tiny": np.asarray(1e-12, np.float32),
    "eps": np.asarray(1e-5, np.float32),
    "one": np.asarray(1, np.float32),
    "root": np.asarray(-0.5, np.float32),
    "two": np.asarray(2, np.float32),
    "shape": np.asarray([1, 16, 8, 8], np.int64),
    "channel": np.asarray([1], np.int64),
}
DIVIDED = {
    "bounded": ("n = ReduceL2<axes = [1]>(a) c = Clip(n, tiny) e = Expand(c, shape) b = Div(a, e)", "n c e"),
    "maximum": ("n = ReduceL2<axes = [1]>(a) c = Max(n, tiny) b = Div(a, c)", "n c"),
    "inverse": ("s = Sigmoid(x) d = Add(s, eps) r = Reciprocal(d) b = Mul(a, r)", "s d"),
    "root": ("s = Sigmoid(x) r = Sqrt(s) b = Div(a, r)", "s r"),
    "power": ("s = Sigmoid(x) r = Pow(s, root) b = Mul(a, r)", "s"),
    "logarithm": ("s = Sigmoid(x) r = Log(s) b = Mul(a, r)", "s"),
    "far from 0": ("s = Sigmoid(x) d = Add(s, one) b = Div(a, d)", "d"),
    "bound far from 0": ("s = Sigmoid(x) d = Clip(s, one) b = Div(a, d)", "d"),
    "sum of two": ("s = Sigmoid(x) t = Tanh(x) d = Add(s, t) b = Div(a, d)", "d"),
    "functions that are 0 at 0": ("t = Tanh(a) e = Erf(t) f = Softsign(e) b = Div(a, f)", "a t e f"),
    "function that is not": ("t = Softplus(a) b = Div(a, t)", "t"),
    "layer norm": (
        """m = ReduceMean<axes = [1]>(a) f = Sub(a, m) q = Pow(f, two) v = ReduceMean<axes = [1]>(q)
        u = Add(v, eps) r = Sqrt(u) b = Div(f, r)""",
        "v u r",
    ),
    "softmax": ("p = Exp(a) s = ReduceSum(p, channel) b = Div(p, s)", "s"),
    "hard-swish": ("p = Add(a, two) c = Clip(p, tiny) m = Mul(a, c) b = Div(m, two)", ""),
    "positive power": ("b = Pow(a, two)", ""),
}


@pytest.mark.parametrize(("nodes", "divisors"), DIVIDED.values(), ids=DIVIDED)
def test_a_divisor_is_found_behind_what_keeps_zeros(nodes: str, divisors: str) -> None:
    model = between(nodes, **CONSTANTS)
    assert facts_of(model).divisors == set(divisors.split())


def test_a_bounded_norm_that_divides_stays_float() -> None:
    nodes = """n = ReduceL2<axes = [1]>(a) [clip] c = Clip(n, tiny) [expand] e = Expand(c, shape) d = Div(a, e)
        [other] b = Clip(d, tiny)"""
    model = between(nodes, **CONSTANTS)
    facts = dataclasses.replace(facts_of(model), native=True)
    plan = native_plan(facts, choose_by(facts, model))
    assert {name: impls(plan)[name] for name in ("clip", "expand", "other")} == {
        "clip": Impl.FLOAT,
        "expand": Impl.FLOAT,
        "other": Impl.U8_NATIVE,
    }
    why = "an operator divides by its result or takes its logarithm, and uint8 would round small values to 0"
    assert reason(plan, "clip") == why


@pytest.mark.parametrize(("divisor", "native"), [("m = Abs(a)", False), ("t = Abs(a) m = Add(t, one)", True)])
def test_a_function_that_is_infinite_at_0_reads_floats(divisor: str, native: bool) -> None:
    model = between(f"{divisor} [function] b = Div(a, m)", **CONSTANTS)
    facts = dataclasses.replace(facts_of(model), native=True)
    forms = possible_forms(facts, choose_by(facts, model))
    assert (Impl.U8_NATIVE in forms["function"]) is native
