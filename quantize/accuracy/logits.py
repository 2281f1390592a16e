"""The logits behind outputs that are probabilities: they tell the noise of a part of a model from few samples.

Probabilities near 0 and 1 hide noise, and those of the few items between two classes decide all of it. The noise of
each tensor of a MobileNetV1 alone was measured on four sets of four images: at the probabilities the sets hardly agree
on the order of the tensors (correlation 0.52), at the logits they do (0.98).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from ...transforms.graphs.queries import is_standard, plain_shape
from ...transforms.int8.ops import MOVES
from .choices import Reader, into
from .classes import SEQUENCE
from .outputs import Accuracy


def logits_of(model: ir.Model) -> dict[str, Reader]:
    """Return the Softmax that writes an output, as the reader of its logits, by the name of the output.

    Maps of probabilities are left out: their many pixels tell enough.

    Args:
        model: A simplified float model.
    """
    found: dict[str, Reader] = {}
    for output in model.graph.outputs:
        shape, node = plain_shape(output), output.producer()
        while node is not None and node.op_type in MOVES and not node.domain and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        if not is_standard(node, "Softmax") or node.inputs[0] is None:
            continue
        if shape is None or len(shape) <= SEQUENCE:
            found[str(output.name)] = (node.name, 0, f"{node.inputs[0].name}{into('Softmax')}")
    return found


def with_logits(accuracy: Accuracy, logits: Mapping[str, str], compared: Accuracy) -> Accuracy:
    """Return a comparison with the SQNR of logits in place of the SQNR of saturated probabilities.

    Args:
        accuracy: The comparison of the outputs: it tells of the classes, and of the other outputs.
        logits: The labels of the logits, by output.
        compared: The comparison with the logits in place of these outputs.
    """
    names = {logits.get(name, name): name in logits for name in accuracy.sqnr_db}
    found = {name: compared if moved else accuracy for name, moved in names.items()}
    worst = [each for each in (accuracy.worst_sample, compared.worst_sample) if each is not None]
    worst = [each for each in worst if each.output in names]
    return replace(
        accuracy,
        sqnr_db={name: each.sqnr_db[name] for name, each in found.items()},
        low_db={name: each.least_db(name) for name, each in found.items()},
        worst_sample=min(worst, key=lambda each: each.sqnr_db, default=None),
        logits=frozenset(logits.values()),
    )
