"""Pipelines as text: what parses, what is refused and with which words, and what running one promises."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant import RequantError
from requant.transforms import (
    Change,
    Pipeline,
    PipelineError,
    Step,
    Transform,
    TransformError,
    VerifyError,
    parse,
    registry,
    run,
)
from requant.transforms import transform as register
from requant.transforms.pipelines import plugins

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N,4] x) => (float[N,4] y) <float[4] w = {1, 2, 3, 4}> {
    [first] t = Mul(x, w)
    [last] y = Relu(t)
}"""


def tune(
    model: ir.Model,
    *,
    gain: float = 1.0,
    times: int = 2,
    exact: bool = False,
    note: str = "",
    node: tuple[str, ...] = (),
) -> Change:
    """Change nothing; has an option of every type."""
    return Change()


def pick(model: ir.Model, *, op: tuple[str, ...], limit: int) -> Change:
    """Change nothing; needs two options."""
    return Change()


def rename(model: ir.Model) -> Change:
    """Rename the inner tensor."""
    model.graph.node("first").outputs[0].name = "renamed"
    return Change(applied=1)


def cut(model: ir.Model, *, inputs: tuple[str, ...] = (), outputs: tuple[str, ...] = ()) -> Change:
    """Report the names that it was given."""
    return Change(skipped=Counter([*inputs, *outputs]))


def give_up(model: ir.Model) -> Change:
    """Fail halfway."""
    model.graph.node("first").outputs[0].name = "half done"
    raise TransformError("node 'first': no")


def leave(model: ir.Model) -> Change:
    """Change nothing, as a transform of the package."""
    return Change()


leave.__module__ = "requant.transforms.leave"


def spoil(model: ir.Model) -> Change:
    """Leave a node that reads what nothing computes."""
    model.graph.node("last").replace_input_with(0, ir.Value(name="nowhere"))
    return Change(applied=1)


def retype(model: ir.Model) -> Change:
    """Change the type of a graph output."""
    model.graph.outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)
    return Change(applied=1)


def late(model: ir.Model) -> Change:
    """Want `rename` and `tune` before."""
    return Change()


@pytest.fixture(autouse=True, scope="module")
def toys() -> Iterator[None]:
    """Replace the registry, so that the texts of the errors depend on nothing else."""
    functions: list[Callable[..., Change]] = [tune, pick, rename, cut, give_up, leave, spoil, retype]
    table: dict[str, Transform] = {}
    with pytest.MonkeyPatch.context() as patch:
        for module in (registry, plugins):
            patch.setattr(module, "REGISTRY", table)
        for function in functions:
            register(function.__name__)(function)
        register("late", after=("rename", "tune"))(late)
        register("give_up_unsorted", takes_unsorted=True)(give_up)
        yield


def model() -> ir.Model:
    return ir.from_onnx_text(MODEL)


def written(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


# --- text

GOOD = [
    ("rename", "rename"),
    ("  rename\n", "rename"),
    ("rename cut", "rename cut"),
    ("rename\n\tcut\r\nrename", "rename cut rename"),
    ("rename()", "rename"),
    ("rename( )", "rename"),
    ("tune(gain=2)", "tune(gain=2.0)"),
    ("tune(gain=-1e-5)", "tune(gain=-1e-05)"),
    ("tune(gain=.5)", "tune(gain=0.5)"),
    ("tune(gain=inf)", "tune(gain=inf)"),
    ("tune(gain=1)", "tune"),
    ("tune(times=2)", "tune"),
    ("tune(times=-3)", "tune(times=-3)"),
    ('tune(times="7")', "tune(times=7)"),
    ("tune(exact=true)", "tune(exact=true)"),
    ("tune(exact=1)", "tune(exact=true)"),
    ("tune(exact=0)", "tune"),
    ("tune(times=3,gain=2)", "tune(gain=2.0, times=3)"),
    ("tune(times=3 gain=2)", "tune(gain=2.0, times=3)"),
    ("tune( times = 3 , gain = 2 )", "tune(gain=2.0, times=3)"),
    ("tune(\n  times=3,\n  gain=2\n)", "tune(gain=2.0, times=3)"),
    ("tune(note=plain_/.:+-9)", "tune(note=plain_/.:+-9)"),
    ('tune(note="quoted")', "tune(note=quoted)"),
    ('tune(note="two words")', 'tune(note="two words")'),
    ('tune(note="say \\"no\\"")', 'tune(note="say \\"no\\"")'),
    ('tune(note="C:\\\\new")', 'tune(note="C:\\\\new")'),
    ('tune(note="a)b(c=1")', 'tune(note="a)b(c=1")'),
    ('tune(note="")', "tune"),
    ("tune(node=a, node=b)", "tune(node=a, node=b)"),
    ('tune(node="a,b", node=c)', "tune(node=a, node=b, node=c)"),
    ('tune(node="conv 1,x:0")', 'tune(node="conv 1", node=x:0)'),
    ("tune(ignore_errors=true)", "tune(ignore_errors=true)"),
    ("tune(ignore_errors=false)", "tune"),
    ("pick(op=Relu, limit=0)", "pick(limit=0, op=Relu)"),
    ("rename tune late", "rename tune late"),
    ("rename tune late tune", "rename tune late tune"),
    ("late", "late"),
]


@pytest.mark.parametrize(("text", "canonical"), GOOD, ids=[repr(text) for text, _ in GOOD])
def test_parse_prints_canonically(text: str, canonical: str) -> None:
    pipeline = parse(text)
    assert str(pipeline) == canonical
    assert parse(canonical) == pipeline


# Text, message, and the text up to the place of the error.
BAD = [
    ("", "the pipeline is empty: name at least one transform", None),
    (" \n ", "the pipeline is empty: name at least one transform", None),
    ("renam", "no transform named 'renam'; did you mean 'rename'?", ""),
    ("rename Rename", "no transform named 'Rename'; did you mean 'rename'?", "rename "),
    (
        "zzz",
        "no transform named 'zzz'; there are: cut, give_up, give_up_unsorted, late, leave, pick, rename, retype, spoil, tune",
        "",
    ),
    ("rename, cut", "expected white space after a step, not ','", "rename"),
    ("rename-cut", "expected white space after a step, not '-'", "rename"),
    ("rename)", "expected white space after a step, not ')'", "rename"),
    ("rename()cut", "expected white space after a step, not 'c'", "rename()"),
    ("(rename)", "expected the name of a transform, not '('", ""),
    ("rename (a=1)", "'(' must directly follow the name of a transform", "rename "),
    ("'rename'", 'expected the name of a transform, not "\'"', ""),
    ("tune(", "'(' is never closed", "tune"),
    ("tune(gain", "'(' is never closed", "tune"),
    ("tune(gain=", "'(' is never closed", "tune"),
    ("tune(gain=1", "'(' is never closed", "tune"),
    ("tune(gain=1,", "'(' is never closed", "tune"),
    ("rename tune(gain=1 late", "'(' is never closed", "rename tune"),
    ('tune(note="abc)', "'\"' is never closed", "tune(note="),
    ('tune(note="abc\\")', "'\"' is never closed", "tune(note="),
    ("tune(=1)", "expected a parameter name, not '='", "tune("),
    ("tune(,gain=1)", "expected a parameter name, not ','", "tune("),
    ("tune(gain=1,)", "expected a parameter name, not ')'", "tune(gain=1,"),
    ("tune(gain=1,,times=1)", "expected a parameter name, not ','", "tune(gain=1,"),
    ("tune(gain)", "expected '=' after parameter 'gain', not ')'", "tune(gain"),
    ("tune(gain 1)", "expected '=' after parameter 'gain', not '1'", "tune(gain "),
    ("tune(gain=)", "expected a value for 'gain', not ')'", "tune(gain="),
    ("tune(note='a')", "expected a value for 'note', not \"'\"", "tune(note="),
    ("tune(node=[1])", "expected a value for 'node', not '['", "tune(node="),
    ("tune(note=a=b)", "expected ',' or ')' after the value of 'note', not '='", "tune(note=a"),
    ('tune(note="a"b)', "expected ',' or ')' after the value of 'note', not 'b'", 'tune(note="a"'),
    ("tune(note=two words)", "expected '=' after parameter 'words', not ')'", "tune(note=two words"),
    ("tune(gian=1)", "tune has no parameter 'gian'; did you mean 'gain'?", "tune("),
    ("rename(a=1)", "rename has no parameter 'a'; there are: ignore_errors", "rename("),
    ("tune(times=1, times=2)", "tune takes one 'times', not two", "tune(times=1, "),
    ("tune(times=x)", "tune: times must be a whole number, not 'x'", "tune(times="),
    ("tune(times=1.5)", "tune: times must be a whole number, not '1.5'", "tune(times="),
    ('tune(times="1_000")', "tune: times must be a whole number, not '1_000'", "tune(times="),
    ("tune(gain=big)", "tune: gain must be a number, not 'big'", "tune(gain="),
    ("tune(gain=nan)", "tune: gain must be a number, not 'nan'", "tune(gain="),
    ('tune(gain="")', "tune: gain must be a number, not ''", "tune(gain="),
    ("tune(exact=True)", "tune: exact must be true, 1, false or 0, not 'True'", "tune(exact="),
    ("tune(ignore_errors=yes)", "tune: ignore_errors must be true, 1, false or 0, not 'yes'", "tune(ignore_errors="),
    ('tune(node="a,,b")', "tune: node holds an empty name: 'a,,b'", "tune(node="),
    ('tune(node="")', "tune: node holds an empty name: ''", "tune(node="),
    ("pick(limit=1)", "pick needs op: pick(op=...)", ""),
    ("rename pick(op=Relu)", "pick needs limit: pick(limit=...)", "rename "),
    ("late rename", "late must come after rename, which this pipeline runs later", ""),
    ("rename late tune", "late must come after tune, which this pipeline runs later", "rename "),
    ("rename\n  tune(gain=1\n    gain=2)", "tune takes one 'gain', not two", "rename\n  tune(gain=1\n    "),
]


@pytest.mark.parametrize(("text", "message", "before"), BAD, ids=[repr(text) for text, _, _ in BAD])
def test_parse_refuses_with_the_place(text: str, message: str, before: str | None) -> None:
    with pytest.raises(PipelineError) as caught:
        parse(text)
    if before is None:
        assert str(caught.value) == message
        return
    line = text.split("\n")[before.count("\n")]
    column = len(before.split("\n")[-1])
    assert str(caught.value) == f"{message} (at character {column + 1} of {line!r})"


NAMES = st.text(min_size=1).filter(lambda text: "," not in text)
VALUES = {
    "gain": st.floats(allow_nan=False).filter(lambda value: value != 1.0),
    "times": st.integers().filter(lambda value: value != 2),
    "exact": st.just(True),
    "note": st.text(min_size=1),
    "node": st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    "ignore_errors": st.just(True),
}


def tuned(options: dict[str, Any]) -> Step:
    return Step("tune", tuple(sorted(options.items())))


STEPS = st.fixed_dictionaries({}, optional=VALUES).map(tuned)


@given(st.lists(st.one_of(STEPS, st.just(Step("rename"))), min_size=1, max_size=4))
def test_what_is_printed_parses_to_the_same(steps: list[Step]) -> None:
    pipeline = Pipeline(tuple(steps))
    assert parse(str(pipeline)) == pipeline


@given(st.text(alphabet='tunerame(),= "\\\n1.') | st.text(max_size=20))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        pipeline = parse(text)
    except PipelineError:
        return
    assert parse(str(pipeline)) == pipeline


# --- running


def test_run_leaves_the_callers_model_alone() -> None:
    mine = model()
    before = written(mine)
    result = run("rename", mine)
    assert written(mine) == before
    assert result.model.graph.node("first").outputs[0].name == "renamed"
    assert result.model.graph.initializers["w"].const_value is mine.graph.initializers["w"].const_value


def test_run_reports_each_step_and_records_the_pipeline() -> None:
    result = run("rename tune(times=2) tune( times=3 )", model())
    assert [(str(step.step), step.change.applied) for step in result.applied] == [
        ("rename", 1),
        ("tune", 0),
        ("tune(times=3)", 0),
    ]
    again = run("cut", result.model)
    assert result.model.metadata_props == {"requant.pipeline": "rename tune tune(times=3)"}
    assert again.model.metadata_props == {"requant.pipeline": "rename tune tune(times=3) cut"}


def test_progress_sees_each_step_before_it_runs() -> None:
    seen: list[str] = []
    with pytest.raises(TransformError):
        run("rename give_up tune", model(), progress=lambda step: seen.append(step.name))
    assert seen == ["rename", "give_up"]


def test_a_failing_step_stops_the_run() -> None:
    mine = model()
    before = written(mine)
    with pytest.raises(TransformError, match=r"^give_up: node 'first': no$"):
        run("rename give_up", mine)
    assert written(mine) == before


def test_ignore_errors_goes_on_from_before_the_step() -> None:
    result = run("rename give_up(ignore_errors=true) tune", model())
    assert result.model.graph.node("first").outputs[0].name == "renamed"
    assert [step.error for step in result.applied] == [None, "node 'first': no", None]
    assert result.model.metadata_props["requant.pipeline"] == "rename tune"


def test_a_model_is_verified_after_a_first_step_that_fails_and_is_ignored() -> None:
    """The first step takes unsorted models, so nothing verified the model before it."""
    mine = model()
    spoil(mine)
    with pytest.raises(VerifyError, match=r"^after leave: node 'last' \(Relu\) reads 'nowhere'"):
        run("give_up_unsorted(ignore_errors=true) leave", mine)


@pytest.mark.parametrize("options", ["", "(ignore_errors=true)"], ids=["strict", "ignoring-errors"])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("spoil", "after spoil: node 'last' (Relu) reads 'nowhere', which nothing computes"),
        (
            "retype",
            "after retype: the graph output was y: FLOAT [N, 4] and is now y: DOUBLE [N, 4]",
        ),
    ],
)
def test_a_spoiled_model_is_never_ignored(step: str, message: str, options: str) -> None:
    with pytest.raises(VerifyError) as caught:
        run(step + options, model())
    assert str(caught.value) == message


def test_verification_can_be_left_out() -> None:
    assert run("spoil", model(), check=False).applied[0].change.applied == 1


def test_a_model_that_was_not_valid_is_not_blamed_on_a_step() -> None:
    broken = model()
    spoil(broken)
    with pytest.raises(VerifyError, match=r"^the model given: node 'last' \(Relu\) reads 'nowhere'"):
        run("rename", broken)


def test_a_wanted_step_that_never_ran_is_noted() -> None:
    alone = run("late", model()).applied[0]
    assert alone.notices == ("late should run after rename", "late should run after tune")
    assert run("rename tune late", model()).applied[2].notices == ()
    assert run("late", run("rename tune", model()).model).applied[0].notices == ()


def test_a_foreign_history_is_no_history() -> None:
    mine = model()
    mine.metadata_props["requant.pipeline"] = "rename tune("
    assert len(run("late", mine).applied[0].notices) == 2


def test_inputs_and_outputs_go_to_the_steps_that_take_them() -> None:
    result = run("rename cut(inputs=own) cut", model(), inputs=["a", "b"], outputs=["c"])
    assert str(result.applied[1].step) == "cut(inputs=own, outputs=c)"
    assert str(result.applied[2].step) == "cut(inputs=a, inputs=b, outputs=c)"
    assert set(result.applied[2].change.skipped) == {"a", "b", "c"}
    assert result.model.metadata_props["requant.pipeline"].endswith("cut(inputs=a, inputs=b, outputs=c)")


def test_inputs_that_nobody_takes_are_refused() -> None:
    with pytest.raises(PipelineError) as caught:
        run("rename cut(inputs=own)", model(), inputs=["a", "b"])
    assert str(caught.value) == "inputs a, b were given, but no step of the pipeline takes inputs"


def test_initializers_of_ir_version_3_stop_being_inputs() -> None:
    old = model()
    old.ir_version = 3
    old.graph.inputs.append(old.graph.initializers["w"])
    result = run("rename", old).model
    assert [value.name for value in result.graph.inputs] == ["x"]
    assert result.ir_version == 4
    assert [value.name for value in old.graph.inputs] == ["x", "w"]


def test_every_error_is_a_requant_error() -> None:
    for error in (PipelineError, TransformError, VerifyError):
        assert issubclass(error, RequantError)
