"""Named groups of transforms. The steps of a group run in the order of their phases."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ... import UnknownNameError
from ...system.given import check_kind, kind_of
from ..registry import TransformError

NAME = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True)
class Member:
    """One step of a group.

    Attributes:
        phase: Steps run in ascending order of phases, and within a phase in the order in which they joined.
        step: A transform as a pipeline writes it, with or without options.
    """

    phase: int
    step: str

    @property
    def transform(self) -> str:
        """The name of the step's transform."""
        return self.step.partition("(")[0].strip()


SKIPPING = frozenset({"simplify"})
"""Groups that leave a model alone which `requant quantize` has written in integers: they would undo its forms."""

GROUPS: dict[str, list[Member]] = {}
"""The members of each group, in the order in which they joined."""


def join(group: str, phase: int, step: str) -> None:
    """Add a step to a group; the first step creates the group.

    Args:
        group: The group's name: letters, digits and ``_``.
        phase: The place of the step in the group. This package's own steps have multiples of 10.
        step: One transform as a pipeline writes it: ``"remove_nodes(op=Identity)"``.

    Raises:
        TransformError: The name of the group is not valid, the phase is no integer, or the group has the same step
            in this phase already.
    """
    for text, what in ((group, "the name of a group"), (step, "a step")):
        check_kind(text, str, f"{what} must be a text")
    if not isinstance(phase, int):
        raise TransformError(f"the phase of {step} must be an integer, not {kind_of(phase)}")
    if not NAME.fullmatch(group):
        raise TransformError(f"no group can be named {group!r}: a name is made of letters, digits and '_'")
    member = Member(phase, step)
    if member in GROUPS.get(group, ()):
        raise TransformError(f"{step} is in phase {phase} of group {group!r} already")
    GROUPS.setdefault(group, []).append(member)


def members(group: str) -> tuple[Member, ...]:
    """Return the steps of a group in the order in which they run.

    Raises:
        UnknownNameError: No group has this name; the message lists similar names.
    """
    check_kind(group, str, "the name of a group must be a text")
    if group not in GROUPS:
        raise UnknownNameError("group", group, GROUPS)
    return tuple(sorted(GROUPS[group], key=lambda member: member.phase))


def groups_of(transform: str) -> tuple[tuple[str, int], ...]:
    """Return the groups in which a transform runs, sorted by name, each with the phase."""
    return tuple(
        (group, member.phase) for group in sorted(GROUPS) for member in members(group) if member.transform == transform
    )


# A simpler graph with the same outputs: `requant quantize` runs this group first.
join("simplify", 0, "inline_functions(ignore_errors=true)")
join("simplify", 0, "remove_default_inputs")
join("simplify", 10, "hoist_loop_constants")
join("simplify", 10, "convert_opset(ignore_errors=true)")
join("simplify", 20, "widen_floats")
join("simplify", 30, "fold_constants")
join("simplify", 40, "unfuse_operators")
join("simplify", 40, "explicit_pads")
join("simplify", 50, "remove_no_ops")
join("simplify", 50, "sink_squeezes")
join("simplify", 50, "split_short_sums")
join("simplify", 60, "simplify_reshapes")
join("simplify", 60, "unshuffle_to_depth")
join("simplify", 60, "scale_resizes")
join("simplify", 60, "remove_expands")
join("simplify", 60, "fuse_channel_norms")
join("simplify", 70, "sink_transposes")
join("simplify", 80, "merge_transposes")
join("simplify", 90, "merge_clips")
join("simplify", 90, "fuse_leaky_relu")
join("simplify", 90, "fuse_prelu")
join("simplify", 100, "fuse_hard_sigmoid")
join("simplify", 100, "scale_before_clip")
join("simplify", 110, "unfuse_gates")
join("simplify", 120, "einsum_to_matmul")
join("simplify", 120, "lift_head_scales")
join("simplify", 130, "normalize_gemm")
join("simplify", 130, "lift_channel_scales")
join("simplify", 140, "fold_batch_norms")
join("simplify", 150, "fuse_pad_and_conv")
join("simplify", 150, "pointwise_conv_to_matmul")
join("simplify", 150, "long_conv_to_matmul")
join("simplify", 160, "fold_pad")
join("simplify", 160, "lift_sequence_convs")
join("simplify", 160, "lift_volume_convs")
join("simplify", 170, "reduce_mean_to_pool")
join("simplify", 170, "lrn_to_pool")
join("simplify", 180, "sum_to_add")
join("simplify", 180, "fold_gated_sums")
join("simplify", 180, "split_merged_heads")
join("simplify", 180, "where_to_add")
join("simplify", 180, "sum_without_concat")
join("simplify", 190, "flush_denormals")
join("simplify", 190, "prune_dead_channels")
join("simplify", 200, "flatten_transposes")
join("simplify", 200, "merge_duplicate_nodes")
join("simplify", 200, "nest_concats")
join("simplify", 210, "strip_unused_nodes")

# The stages of docs/flow.md, which names the log `min_max.log`.
join("quantize", 10, "quantize_weights")
join("quantize", 20, "quantize_nodes")

join("freeze", 10, "freeze_max(min_max_log_file=min_max.log)")
join("freeze", 20, "freeze_min(min_max_log_file=min_max.log)")
join("freeze", 30, "freeze_requantization_ranges(min_max_log_file=min_max.log)")

join("fuse", 10, "fuse_quantized_conv_and_requantize")
join("fuse", 20, "fuse_quantized_matmul_and_requantize")
join("fuse", 30, "strip_unused_nodes")
