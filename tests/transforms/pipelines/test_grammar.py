"""The grammar over the transforms that there are: texts from the field, good and bad; printing and parsing.

`tests/transforms/pipelines/test_pipeline.py` has the grammar itself, over transforms made for that.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.transforms import GROUPS, REGISTRY, Pipeline, PipelineError, Step, parse, parse_groups
from requant.transforms.pipelines.pipeline import IGNORE_ERRORS
from requant.transforms.registry import REQUIRED, Option

# As people write pipelines, and what each is.
GOOD = [
    ("fold_constants fold_batch_norms", "fold_constants fold_batch_norms"),
    (
        "strip_unused_nodes remove_nodes(op=Identity, op=CheckNumerics) fold_constants(ignore_errors=true)",
        "strip_unused_nodes remove_nodes(op=Identity, op=CheckNumerics) fold_constants(ignore_errors=true)",
    ),
    ("remove_nodes(op=Identity op=Dropout)", "remove_nodes(op=Identity, op=Dropout)"),
    ('remove_nodes(op="Identity,Dropout")', "remove_nodes(op=Identity, op=Dropout)"),
    ("remove_nodes( op = Identity , op = Dropout )", "remove_nodes(op=Identity, op=Dropout)"),
    ("\n  fold_constants\n  merge_duplicate_nodes\n", "fold_constants merge_duplicate_nodes"),
    ("fold_constants(ignore_errors=1)", "fold_constants(ignore_errors=true)"),
    ("fold_constants(ignore_errors=0)", "fold_constants"),
    ("quantize_weights quantize_nodes", "quantize_weights quantize_nodes"),
    ("quantize_weights(minimum_size=16)", "quantize_weights(minimum_size=16)"),
    ("quantize_nodes(fallback_min=-1e3, fallback_max=+6)", "quantize_nodes(fallback_max=6.0, fallback_min=-1000.0)"),
    (
        'insert_logging(op=RequantizationRange, show_name=true, message="__requant_min_max:")',
        "insert_logging(message=__requant_min_max:, op=RequantizationRange, show_name=true)",
    ),
    ("insert_logging(first_n=-1, summarize=1024)", "insert_logging"),
    ('insert_logging(message=";a b;")', 'insert_logging(message=";a b;")'),
    ("freeze_max(min_max_log_file=./logs/min_max.log)", "freeze_max(min_max_log_file=./logs/min_max.log)"),
    (
        'freeze_requantization_ranges(min_max_log_file="my log", max_percentile=99.5)',
        'freeze_requantization_ranges(max_percentile=99.5, min_max_log_file="my log")',
    ),
    ("strip_unused_nodes(outputs=/head/MatMul_output_0)", "strip_unused_nodes(outputs=/head/MatMul_output_0)"),
    ('strip_unused_nodes(inputs="x:0,y:0")', "strip_unused_nodes(inputs=x:0, inputs=y:0)"),
    ("convert_opset(to=21)", "convert_opset(to=21)"),
]

# Text, message, and the text up to the place of the error.
BAD = [
    ("fold_batch_norm", "no transform named 'fold_batch_norm'; did you mean 'fold_batch_norms'", ""),
    ("fold_constants, fold_batch_norms", "expected white space after a step, not ','", "fold_constants"),
    ("fold_constants;fold_batch_norms", "expected white space after a step, not ';'", "fold_constants"),
    ("remove_nodes (op=Identity)", "'(' must directly follow the name of a transform", "remove_nodes "),
    ("remove_nodes(op=Identity", "'(' is never closed", "remove_nodes"),
    ("remove_nodes(op=Identity))", "expected white space after a step, not ')'", "remove_nodes(op=Identity)"),
    ("remove_nodes(op='Identity')", "expected a value for 'op', not \"'\"", "remove_nodes(op="),
    ("remove_nodes(ops=Identity)", "remove_nodes has no parameter 'ops'; did you mean 'op'?", "remove_nodes("),
    ("remove_nodes(op=Identity, op=)", "expected a value for 'op', not ')'", "remove_nodes(op=Identity, op="),
    ("quantize_weights(minimum_size=1k)", "quantize_weights: minimum_size must be a whole number, not '1k'", "quantize_weights(minimum_size="),
    ("quantize_nodes(input_min=low)", "quantize_nodes: input_min must be a number, not 'low'", "quantize_nodes(input_min="),
    ("insert_logging(show_op=yes)", "insert_logging: show_op must be true, 1, false or 0, not 'yes'", "insert_logging(show_op="),
    ('insert_logging(message="a)', "'\"' is never closed", "insert_logging(message="),
    ("freeze_max", "freeze_max needs min_max_log_file: freeze_max(min_max_log_file=...)", ""),
    ("convert_opset(to=13, to=17)", "convert_opset takes one 'to', not two", "convert_opset(to=13, "),
    (
        "fold_batch_norms fold_constants",
        "fold_batch_norms must come after fold_constants, which this pipeline runs later",
        "",
    ),
    ("fold_constants\nquantize_nodes quantize_weights", "quantize_nodes must come after quantize_weights, which this pipeline runs later", "fold_constants\n"),
    ("--transforms fold_constants", "expected the name of a transform, not '-'", ""),
]  # fmt: skip


def shown(message: str, text: str, before: str) -> str:
    """Return a message with the place in its line."""
    line = text.split("\n")[before.count("\n")]
    return f"{message} (at character {len(before.rpartition(chr(10))[2]) + 1} of {line!r})"


@pytest.mark.parametrize(("text", "canonical"), GOOD, ids=[repr(text) for text, _ in GOOD])
def test_what_is_good_prints_canonically(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical
    assert parse(canonical) == parse(text)


@pytest.mark.parametrize(("text", "message", "before"), BAD, ids=[repr(text) for text, _, _ in BAD])
def test_what_is_bad_is_refused_in_these_words(text: str, message: str, before: str) -> None:
    with pytest.raises(PipelineError) as caught:
        parse(text)
    if "did you mean 'fold_batch_norms'" in message:  # names that are near may be more
        assert str(caught.value).startswith(message)
        assert str(caught.value).endswith(shown("", text, before))
    else:
        assert str(caught.value) == shown(message, text, before)


def test_the_tables_are_long_enough() -> None:
    """With those of `tests/transforms/pipelines/test_pipeline.py`, which has more than 80."""
    assert len(GOOD) + len(BAD) >= 35
    assert len({text for text, *_ in (*GOOD, *BAD)}) == len(GOOD) + len(BAD)


# --- every transform and every option of it

NAMES = st.text(min_size=1, max_size=8).filter(lambda text: "," not in text)
VALUES: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=8),
    tuple: st.lists(NAMES, min_size=1, max_size=3).map(tuple),
}


def steps(name: str) -> st.SearchStrategy[Step]:
    """Return steps of a transform with any options that it may have."""
    options = {IGNORE_ERRORS.name: IGNORE_ERRORS, **REGISTRY[name].options}

    def value(option: Option) -> st.SearchStrategy[Any]:
        return VALUES[option.type].filter(lambda found: found != option.default)

    needed = {key: value(option) for key, option in options.items() if option.default is REQUIRED}
    free = {
        key: st.just(not option.default) if option.type is bool else value(option)
        for key, option in options.items()
        if key not in needed
    }
    chosen = st.fixed_dictionaries(needed, optional=free)
    return chosen.map(lambda found: Step(name, tuple(sorted(found.items()))))


@given(st.sampled_from(sorted(REGISTRY)).flatmap(steps))
def test_every_step_prints_as_what_parses_to_it(step: Step) -> None:
    pipeline = Pipeline((step,))
    assert parse(str(pipeline)) == pipeline
    assert str(parse(str(pipeline))) == str(pipeline)


@given(st.lists(st.sampled_from(sorted(GROUPS)), min_size=1, max_size=3).map(" ".join))
def test_every_pipeline_of_groups_prints_as_what_parses_to_it(text: str) -> None:
    try:
        pipeline = parse_groups(text)
    except PipelineError as error:  # groups too may be in an order that their steps do not allow
        if "must come after" not in str(error):
            raise
        return
    assert parse(str(pipeline)) == pipeline
