"""Placement by the clock: costs, what they are of, plan files, and what comes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from requant import RequantError
from requant.calibration.model.session import open_session
from requant.cli import main
from requant.quantize import Options, Selection, measure_costs, quantize_model
from requant.quantize.placement import costs as store
from requant.quantize.placement.costs import Costs, signature
from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.forms import possible_forms
from requant.quantize.placement.layouts import layout_costs
from requant.quantize.placement.measuring import least_kernels, settled
from requant.quantize.placement.rules import choose_by
from requant.quantize.runtime import machine
from requant.quantize.runtime.attribution import Owners
from requant.quantize.runtime.machine import Machine
from requant.quantize.runtime.profile import KernelRun, Profile
from requant.transforms.int8.plan import Impl
from requant.transforms.int8.qparams import Scheme

DIGITS = Path(__file__).parents[3] / "sample_models" / "digits.onnx"
TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 16, {side}, {side}] x) => (float[N, 16, {side}, {side}] y) {{
    [first] a = Conv <pads = [1, 1, 1, 1]> (x, w)
    [gate] s = Sigmoid (a)
    [silu] b = Mul (a, s)
    [second] y = Conv <pads = [1, 1, 1, 1]> (b, w)
}}"""
Invoke = Any


def model(side: int = 8) -> ir.Model:
    weights = np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype(np.float32) / 8
    return ir.from_onnx_text(TEXT.format(side=side), initializers=[ir.tensor(weights, name="w")])


def saved(folder: Path, side: int = 8) -> tuple[Path, Path]:
    """Write the model and data for it."""
    ir.save(model(side), folder / "m.onnx")
    np.savez(folder / "d.npz", x=np.random.default_rng(1).standard_normal((4, 16, side, side)).astype(np.float32))
    return folder / "m.onnx", folder / "d.npz"


@pytest.fixture(autouse=True)
def _no_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUANT_CACHE", str(tmp_path / "cache"))


# ---------------------------------------------------------------------------------------------------- what may be


def test_what_a_measurement_may_decide() -> None:
    made = model()
    facts = facts_of(made)
    rules = choose_by(facts, made)
    assert rules.choices["silu"].impl is Impl.FLOAT
    assert possible_forms(facts, rules) == {
        "first": (Impl.FLOAT, Impl.U8),
        "silu": (Impl.FLOAT, Impl.U8),
        "second": (Impl.FLOAT, Impl.U8),
    }
    shifted = possible_forms(replace(facts, zero_points=True), rules)
    assert shifted["first"] == (Impl.FLOAT, Impl.U8, Impl.U8_GEMM)
    assert shifted["silu"] == (Impl.FLOAT, Impl.U8)
    kept = replace(facts, kept_float={"b": "because"})
    assert possible_forms(kept, choose_by(kept, made))["silu"] == (Impl.FLOAT,)


@pytest.mark.parametrize(
    ("node", "owner"),
    [
        ("first", "first"),
        ("first_token_12", "first"),
        ("a_nchwc", "first"),
        ("b_bn_nchwc", "silu"),
        ("gate", "silu"),
        ("silu/QuickGeluFusion/", "silu"),
        ("first/MatMulAddFusion", "first"),
        ("gate/lookup", "silu"),
        ("second/apart", "second"),
        ("fused first", "first"),
        ("reorder_token_3", None),
        ("stranger", None),
    ],
)
def test_kernels_find_their_units(node: str, owner: str | None) -> None:
    made = model()
    assert Owners(made, choose_by(facts_of(made), made).units).of(node) == owner


def test_kernel_times_with_waiting_are_found_and_shortened() -> None:
    """Two kernels of 4 and 1 ms. The long one waits for a processor in most profiles, the short one never."""

    def once(long: float, cpu: float | None) -> Profile:
        runs = [KernelRun(name, "", "Conv", ms, 0, ()) for name, ms in (("long", long), ("short", 1.0))]
        return Profile(tuple(runs), long + 1.0, cpu)

    waited, quiet = once(9.0, 5.5), once(4.0, 5.2)
    assert not settled([waited])
    assert settled([waited, quiet])
    assert [run.microseconds for run in least_kernels([waited, quiet])] == [4.0, 1.0]
    assert sum(run.microseconds for run in least_kernels([waited])) == pytest.approx(5.5)
    several = [once(9.0, None), once(6.0, None), once(4.0, None)]  # threads have no CPU time of their own
    assert [settled(several[:count]) for count in range(4)] == [True, False, False, False]
    assert settled([*several, once(4.1, None)])


def test_time_is_told_apart() -> None:
    made = model()
    owners = Owners(made, choose_by(facts_of(made), made).units)
    names = [
        ("a_nchwc", "Conv", 8.0),
        ("silu", "QuickGelu", 4.0),
        ("b/quantize", "QuantizeLinear", 2.0),
        ("Transpose_token_7", "Transpose", 1.0),
        ("odd", "Cast", 0.5),
    ]
    spent = owners.spent([KernelRun(name, "", op, time, 0, ((2, 3),)) for name, op, time in names])
    assert (spent.units, spent.conversions, spent.layouts, spent.rest) == ({"first": 8, "silu": 4}, 2, 1, 0.5)
    assert spent.total == 15.5
    assert spent.sizes == {"first": 6, "silu": 6}


def test_a_product_that_is_named_after_its_function_belongs_to_the_unit_before_it() -> None:
    made = model()
    owners = Owners(made, choose_by(facts_of(made), made).units)
    fused = KernelRun("b_nchwc", "", "Conv", 8.0, 1000, ((1, 16, 8, 8),))
    alone = KernelRun("b_nchwc", "", "Sigmoid", 2.0, 0, ((1, 16, 8, 8),))
    assert owners.spent([fused]).units == {"first": 8.0}
    assert owners.spent([alone]).units == {"silu": 2.0}
    assert owners.spent([replace(fused, op="ConvTranspose")]).units == {"silu": 8.0}  # a product of its own
    assert owners.spent([replace(fused, node="b_bn_nchwc")]).units == {"silu": 8.0}  # a BatchNormalization


def test_changes_of_layout_are_a_part_of_the_convolutions_that_ask_for_them() -> None:
    """Of two reorders of `a` and one of `b`, each convolution has those of the tensors that it writes and reads."""
    made = model()
    units = choose_by(facts_of(made), made).units
    shape = (1, 16, 8, 8)
    names = [("ReorderInput", 3.0), ("ReorderOutput", 5.0), ("ReorderInput", 3.0), ("ReorderOutput", 1.0)]
    runs = [KernelRun(f"{op}_{index}", "", op, time, 0, (shape,)) for index, (op, time) in enumerate(names)]
    whole = Owners(made, units).spent([*runs, KernelRun("Transpose", "", "Transpose", 9.0, 0, ((1, 8, 8, 16),))])
    turned = layout_costs(units, dict.fromkeys("xaby", shape), whole)
    assert turned.input == {"x": 3.0, "b": 3.0}
    assert turned.output == {"a": 3.0, "y": 3.0}
    assert {unit.name: turned.of(unit) for unit in units} == {"first": 6.0, "silu": 0.0, "second": 6.0}
    assert not layout_costs(units, {}, whole).input


def test_convolutions_that_read_one_tensor_share_its_change_of_layout() -> None:
    made = model()
    first, _, second = choose_by(facts_of(made), made).units
    other = replace(second, name="other", inputs=first.inputs)
    whole = Owners(made, (first, other)).spent([KernelRun("r", "", "ReorderInput", 3.0, 0, ((1, 16, 8, 8),))])
    turned = layout_costs((first, other), {"x": (1, 16, 8, 8)}, whole)
    assert turned.input == {"x": 3.0}
    assert turned.of(first) == turned.of(other) == 1.5


def test_channels_are_padded_to_blocks() -> None:
    made = model()
    units = choose_by(facts_of(made), made).units
    whole = Owners(made, units).spent([KernelRun("r", "", "ReorderInput", 3.0, 0, ((1, 16, 8, 8),))])
    assert layout_costs(units, {"x": (1, 3, 8, 8)}, whole).input == {"x": 3.0}


# ---------------------------------------------------------------------------------------------------------- costs


def test_a_signature_is_of_shapes_and_attributes_not_of_names() -> None:
    made, other = model(), model()
    for node in other.graph:
        node.name = f"other_{node.name}"
    shapes = {"x": (1, 16, 8, 8), "a": (1, 16, 8, 8), "b": (1, 16, 8, 8)}

    def keys(of: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        facts = facts_of(of)
        return [signature(unit, facts.nodes, shapes) for unit in choose_by(facts, of).units]

    first, gate, second = keys(made, shapes)
    assert keys(other, shapes) == [first, gate, second]
    assert first == second != gate
    assert set(keys(made, {name: (2, *shape[1:]) for name, shape in shapes.items()})).isdisjoint({first, gate})
    made.graph.node("second").attributes["pads"] = ir.AttrInt64s("pads", [0, 0, 2, 2])
    assert keys(made, shapes)[2] != second


def test_costs_survive_a_file_and_keep_the_least(tmp_path: Path) -> None:
    costs = Costs(Machine("1.2", "a cpu", 1))
    for microseconds in (5.0, 3.0, 4.0):
        costs = costs.with_times([("Conv-1", Impl.U8, microseconds)])
    store.save(costs, tmp_path / "c.json")
    assert store.read(tmp_path / "c.json") == costs
    assert costs.of("Conv-1", Impl.U8) == 3.0
    assert costs.of("Conv-1", Impl.FLOAT) is costs.of("Conv-2", Impl.U8) is None


BROKEN = {
    "not a costs file: Expecting": "{",
    "schema 2; this program reads 1": '{"schema": 2}',
    "missing required field 'runtime'": '{"schema": 1}',
    "costs of 'a': invalid enum value 'int4'": '{"schema": 1, "runtime": "", "cpu": "", "threads": 1, "costs": {"a": {"int4": 1}}}',
    "costs of 'a': .*expected float >= 0": '{"schema": 1, "runtime": "", "cpu": "", "threads": 1, "costs": {"a": {"float": -1}}}',
}


@pytest.mark.parametrize(("said", "text"), BROKEN.items(), ids=BROKEN)
def test_files_that_hold_no_costs(tmp_path: Path, said: str, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(RequantError, match=rf"c\.json: .*{said}"):
        store.read(tmp_path / "c.json")


def test_what_is_kept_is_of_one_machine(tmp_path: Path) -> None:
    here, there = Machine("1", "a", 1), Machine("1", "a", 2)
    store.keep(Costs(here, {"x": {"float": 2.0}}))
    store.keep(Costs(here, {"x": {"float": 1.0}, "y": {"u8->u8": 3.0}}))
    assert store.load(here).rows == {"x": {"float": 1.0}, "y": {"u8->u8": 3.0}}
    assert store.load(there).rows == {}
    store.path_of(here).write_text("not JSON")
    assert store.load(here).rows == {}  # what cannot be read is measured again
    assert store.clear() == 1
    assert store.kept() == []


def test_another_library_of_native_operators_has_other_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, paths = Machine.here(1), []
    for name in ("one", "two", "none"):
        if name != "none":
            (tmp_path / name).write_text(name)
        monkeypatch.setattr(store, "OPERATORS", tmp_path / name)
        paths.append(store.path_of(here).name)
    assert len(set(paths)) == 3
    assert paths[2] == f"costs-{here.key}.json"


def test_cpus_of_one_name_differ_by_their_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for found in ((), ("avx2",), ("avx2", "amx_int8")):
        monkeypatch.setattr(machine, "flags", lambda found=found: found)
        keys.add(Machine.here(1).key)
    assert len(keys) == 3


@pytest.mark.slow
def test_costs_are_measured_and_place(tmp_path: Path) -> None:
    path, data = saved(tmp_path, side=32)
    costs = measure_costs(path, str(data), Options(isa="vnni"))
    assert {key.partition("-")[0] for key in costs.rows} == {"Conv", "gate"}
    assert all({"float", "u8->u8"} <= set(row) for row in costs.rows.values())
    for fastest in ("float", "u8->u8", "u8->u8 gemm"):  # costs that leave no doubt
        sure = Costs(
            costs.machine, {key: {impl: 1e3 * (impl != fastest) for impl in row} for key, row in costs.rows.items()}
        )
        store.save(sure, tmp_path / "c.json")
        options = Options(costs=tmp_path / "c.json", isa="vnni", force=True, force_int8=True, seconds=0.1)
        found = quantize_model(path, str(data), tmp_path / "o.onnx", options)
        assert found.int8_nodes == (0 if fastest == "float" else 4)
        assert found.forms.get("u8->u8 gemm", 0) == (2 if fastest == "u8->u8 gemm" else 0)
        assert found.placement.how == "estimated"


# --------------------------------------------------------------------------------------------------------- plans


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.stderr


def notes_by(model: Path, data: Path, plan: Path) -> list[str]:
    """Return the notes about the plan file of a run by it."""
    options = Options(plan=plan, force=True, force_int8=True, seconds=0.01)
    found = quantize_model(model, str(data), plan.with_name("by_plan.onnx"), options)
    return [note for note in found.notes if "the rules decide" in note]


def test_every_run_writes_its_plan_which_can_be_edited_and_used_again(tmp_path: Path) -> None:
    path, data = saved(tmp_path)
    output, plan = tmp_path / "o.onnx", tmp_path / "o.plan.json"
    base = ("quantize", path, "--data", data, "-o", output, "--force-int8")
    assert invoke(*base, "--place", "rules")[0] == 0
    units = json.loads(plan.read_text())["units"]
    assert {name: row["implementation"] for name, row in units.items()} == {
        "first": "u8->u8",
        "silu": "float",
        "second": "u8->u8",
    }
    assert "float" in units["silu"]["reason"]
    units["silu"]["implementation"], units["second"]["implementation"] = "u8->u8", "float"
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps({"schema": 1, "units": units}))
    assert notes_by(path, data, edited) == []
    assert invoke(*base, "--plan", edited, "--force")[0] == 0
    again = json.loads(plan.read_text())["units"]
    assert [again[name]["implementation"] for name in ("first", "silu", "second")] == ["u8->u8", "u8->u8", "float"]
    assert "edited.json says so" in again["second"]["reason"]
    edited.write_text(json.dumps({"schema": 1, "units": {"second": "float"}}))
    assert notes_by(path, data, edited) == [
        f"{edited}: names 1 of 3 units; the rules decide the others: 'first', 'silu'"
    ]
    assert invoke(*base, "--plan", edited, "--force")[0] == 0
    assert json.loads(plan.read_text())["units"]["silu"]["implementation"] == "float"


def unshare_weights(path: Path) -> None:
    """Give the second convolution other weights.

    The runtime's conversion of int8 weights to uint8 on a CPU without VNNI fails where two nodes read them.
    """
    proto = onnx.load(path)
    (weights,) = proto.graph.initializer
    proto.graph.initializer.append(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weights)[::-1], "v"))
    (second,) = (node for node in proto.graph.node if node.name == "second")
    second.input[1] = "v"
    onnx.save(proto, path)


def with_plan(folder: Path, units: Mapping[str, Any], **options: Any) -> tuple[Path, int]:
    """Quantize the model by a plan; return where it is, and how many units are matrix products."""
    path, data = saved(folder)
    unshare_weights(path)
    (folder / "p.json").write_text(json.dumps({"schema": 1, "units": units}))
    output = folder / "o.onnx"
    asked = Options(**{"isa": "vnni"} | options, plan=folder / "p.json", force=True, force_int8=True, seconds=0.01)
    found = quantize_model(path, str(data), output, asked)
    return output, found.forms.get("u8->u8 gemm", 0)


@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_a_convolution_as_a_matrix_product_computes_the_same(tmp_path: Path, form: str) -> None:
    feeds = {"x": np.random.default_rng(2).standard_normal((2, 16, 8, 8)).astype(np.float32)}
    found = []
    for impl in ("u8->u8", "u8->u8 gemm"):
        output, gemms = with_plan(tmp_path, {"first": impl, "second": impl}, format=form)
        assert gemms == (2 if "gemm" in impl else 0)
        weights = {n.name: n.const_value.numpy() for n in ir.load(output).graph.initializers.values() if n.const_value}
        zeros = {int(z) for name, array in weights.items() if str(name).startswith("w/zero") for z in array}
        assert zeros == ({-1} if "gemm" in impl else {0})
        found.append(open_session(output).run(None, feeds)[0])
    np.testing.assert_array_equal(*found)  # the same sums of the same products


@pytest.mark.parametrize(
    "options",
    [{"isa": "avx2"}, {"scheme": Scheme(weight="u8")}, {"scheme": Scheme(activation="s8")}],
    ids=["sums of 16 bits", "unsigned weights", "signed activations"],
)
def test_targets_without_convolutions_as_matrix_products(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(RequantError, match="cannot be 'u8->u8 gemm'"):
        with_plan(tmp_path, {"first": "u8->u8 gemm"}, **options)


def test_a_body_that_a_unit_cannot_have_is_refused(tmp_path: Path) -> None:
    row = {"implementation": "u8->u8", "body": "u8->u8 gemm"}
    with pytest.raises(RequantError, match="unit 'first' cannot have the body 'u8->u8 gemm'; it can have: u8->u8"):
        with_plan(tmp_path, {"first": row})


def test_a_form_that_a_unit_cannot_have_is_refused_with_the_cause(tmp_path: Path) -> None:
    without = Selection(exclude_nodes=frozenset({"first"}))
    with pytest.raises(RequantError, match=r"unit 'first' cannot be 'u8->u8' \(.*exclude.*\); it can be: float"):
        with_plan(tmp_path, {"first": "u8->u8"}, selection=without)


def test_groups_are_no_matrix_product() -> None:
    made = model()
    made.graph.node("first").attributes["group"] = ir.AttrInt64("group", 2)
    facts = replace(facts_of(made), zero_points=True)
    assert Impl.U8_GEMM not in possible_forms(facts, choose_by(facts, made))["first"]


REFUSED = {
    "no unit of": '{"schema": 1, "units": {"secund": "float"}}',
    "cannot be 'u8->float'; it can be: float, u8->u8": '{"schema": 1, "units": {"second": "u8->float"}}',
    "plan file of schema 3; this program reads 1": '{"schema": 3, "units": {}}',
    "unit 'second': object contains unknown field 'bdy'": json.dumps(
        {"schema": 1, "units": {"second": {"implementation": "u8->u8", "bdy": "u8->u8 gemm"}}}
    ),
    "unknown field 'unit'": '{"schema": 1, "units": {}, "unit": {"second": "float"}}',
    "not a plan file: it has 'costs'": '{"schema": 1, "costs": {}}',
    "not a plan file": "]",
    "no such file": None,
}


@pytest.mark.parametrize(("said", "text"), REFUSED.items(), ids=REFUSED)
def test_plans_that_do_not_fit(tmp_path: Path, said: str, text: str | None) -> None:
    path, data = saved(tmp_path)
    if text is not None:
        (tmp_path / "p.json").write_text(text)
    code, stderr = invoke("quantize", path, "--data", data, "-o", tmp_path / "o.onnx", "--plan", tmp_path / "p.json")
    assert code == 2
    assert said in stderr
    assert "p.json" in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "o.onnx").exists()


def test_a_plan_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path, data = saved(tmp_path)
    (tmp_path / "o.plan.json").write_text("mine")
    code, stderr = invoke("quantize", path, "--data", data, "-o", tmp_path / "o.onnx")
    assert (code, (tmp_path / "o.plan.json").read_text()) == (2, "mine")
    assert "o.plan.json" in stderr


# ------------------------------------------------------------------------------------------------------- measured


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["measured", *(pytest.param(how, marks=pytest.mark.slow) for how in ("all", "estimated", "rules"))]
)
def test_all_ways_of_placing_give_a_model_that_agrees(tmp_path: Path, place: str) -> None:
    path, data = saved(tmp_path, side=128)
    options = Options(place=place, force_int8=True, seconds=0.2)
    found = quantize_model(path, str(data), tmp_path / "o.onnx", options)
    assert found.placement.how == place
    assert found.accuracy.worst_sqnr_db > 20  # two layers of 8 bits: about 40 dB each, less their gains
    if place == "all":
        assert found.forms == {"u8->u8": 3}
    if place == "measured":
        assert {"rules", "all"} <= set(found.placement.tried)
        assert found.predicted_ms is not None
        assert found.predicted_ms > 0
        kept = store.load(Machine.here(1)).rows
        assert bool(kept) == found.placement.sure  # on a busy machine kernels wait, and nothing is kept


def test_what_is_too_small_to_time_is_placed_by_rules(tmp_path: Path) -> None:
    path, data = saved(tmp_path, side=4)
    found = quantize_model(path, str(data), tmp_path / "o.onnx", Options(force_int8=True, seconds=0.1))
    assert found.placement.how == "rules"


@pytest.mark.usefixtures("measured_briefly")
def test_a_model_of_a_fraction_of_a_millisecond_is_placed_by_costs(tmp_path: Path) -> None:
    options = Options(seconds=0.1, samples=8, effort="low", force_int8=True)
    found = quantize_model(DIGITS, f"{DIGITS.with_suffix('.npz')}:calib", tmp_path / "o.onnx", options)
    assert found.placement.how == "measured"
    assert {"rules", "all"} <= {*found.placement.tried}


def test_noise_has_a_price(tmp_path: Path) -> None:
    path, data = saved(tmp_path)
    options = Options(place="estimated", force=True, force_int8=True, seconds=0.1)
    dear = quantize_model(path, str(data), tmp_path / "o.onnx", replace(options, noise_weight=1e9))
    assert dear.int8_nodes == 0


# -------------------------------------------------------------------------------------------------------- refused


@pytest.mark.slow
def test_a_plan_goes_with_every_way_of_placing(tmp_path: Path) -> None:
    path, data = saved(tmp_path)
    options = Options(place="all", force=True, force_int8=True, seconds=0.1)
    quantize_model(path, str(data), tmp_path / "o.onnx", options)
    again = replace(options, place="rules", plan=tmp_path / "o.plan.json")
    assert quantize_model(path, str(data), tmp_path / "p.onnx", again).forms == {"u8->u8": 3}
    with pytest.raises(RequantError, match="rename the edited plan"):
        quantize_model(path, str(data), tmp_path / "o.onnx", replace(again, force_int8=False))


def test_a_plan_is_written_as_it_was_read(tmp_path: Path) -> None:
    path, data = saved(tmp_path)
    plan = {
        "first": {"operator": "Conv", "implementation": "float", "reason": "0.94x the speed of float"},
        "silu": {"operator": "Silu", "implementation": "u8->u8"},
        "second": {"operator": "Conv", "implementation": "u8->u8"},
    }
    (tmp_path / "o.plan.json").write_text(json.dumps({"schema": 1, "units": plan}))
    options = Options(plan=tmp_path / "o.plan.json", force=True, force_int8=True, seconds=0.1)
    found = quantize_model(path, str(data), tmp_path / "o.onnx", options)
    written = json.loads((tmp_path / "o.plan.json").read_text())["units"]
    assert {name: row["implementation"] for name, row in written.items()} == {
        name: row["implementation"] for name, row in plan.items()
    }
    assert written["first"] == plan["first"]
    assert found.float_nodes[0].reason == "0.94x the speed of float"


@pytest.mark.parametrize("others", [{"place": "rules"}, {"place": "all"}, {"plan": "p.json"}], ids=str)
def test_costs_and_prices_that_would_decide_nothing(others: dict[str, Any]) -> None:
    with pytest.raises(RequantError, match="costs have no effect"):
        Options(costs="c.json", **others)
    with pytest.raises(RequantError, match="a price of noise has no effect"):
        Options(noise_weight=1.0, **others)


def test_costs_of_other_threads(tmp_path: Path) -> None:
    path, data = saved(tmp_path)
    store.save(Costs(Machine("1", "a", 8)), tmp_path / "c.json")
    with pytest.raises(RequantError, match=r"c\.json: measured on 8 threads, not 1"):
        quantize_model(path, str(data), tmp_path / "o.onnx", Options(costs=tmp_path / "c.json"))


def test_costs_of_another_model_are_refused_and_of_a_part_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = saved(tmp_path)
    machine = Machine.here(1)
    options = Options(costs=tmp_path / "c.json", isa="vnni", force_int8=True, seconds=0.1, effort="low")
    store.save(Costs(machine, {"Conv-00": {"float": 1.0, "u8->u8": 1.0}}), tmp_path / "c.json")
    monkeypatch.setattr("requant.quantize.api.find_ranges", lambda _: pytest.fail("it calibrates"))
    with pytest.raises(RequantError) as error:
        quantize_model(path, str(data), tmp_path / "o.onnx", options)
    monkeypatch.undo()
    told = f"{tmp_path / 'c.json'}: has costs of no unit of {path}; measure them with "
    told += "'requant costs measure' (in Python: measure_costs) at the same batch size"
    assert str(error.value) == told
    measured = measure_costs(path, str(data), Options(isa="vnni"))
    first, *others = measured.rows
    assert others
    store.save(Costs(machine, {first: measured.rows[first]}), tmp_path / "c.json")
    quantize_model(path, str(data), tmp_path / "o.onnx", options)
    assert f"1 of {1 + len(others)} kinds of units have costs in {tmp_path / 'c.json'}" in caplog.text


def test_shapes_of_free_axes_come_from_the_feed(tmp_path: Path) -> None:
    keys = []
    for side in (32, 64):
        made = model(side)
        made.graph.inputs[0].shape = ir.Shape(["N", 16, "H", "W"])
        made.graph.outputs[0].shape = ir.Shape(["N", 16, "H", "W"])
        ir.save(made, tmp_path / "m.onnx")
        np.savez(tmp_path / "d.npz", x=np.ones((2, 16, side, side), np.float32))
        keys.append(set(measure_costs(tmp_path / "m.onnx", str(tmp_path / "d.npz")).rows))
    assert keys[0].isdisjoint(keys[1])
