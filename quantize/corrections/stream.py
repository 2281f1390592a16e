"""A model run piece by piece over a few samples. Each piece reads the corrected results of the pieces before it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ... import RequantError
from ...calibration.model.session import run_session
from ...transforms.graphs.inference import inferred
from ..runtime.spread import spread
from .piece_models import PieceModels
from .pieces import Piece, Reads, Uses, cut

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

    from ...calibration.model.session import Array


GROUP = 8
"""Pieces in one session. An If whose branch is not taken costs some microseconds a run, a session some milliseconds."""


class Stream:
    """The tensors of a model for some samples. Each is computed when it is first taken, and kept while it is read.

    A session runs up to `GROUP` pieces: its model has each in the branch of an If, since the runtime executes all nodes
    whatever outputs are fetched. A piece with a tensor of unknown type has a session of its own.
    """

    def __init__(
        self,
        model: ir.Model,
        feeds: Sequence[Mapping[str, Array]],
        stops: Collection[ir.Value],
        types: Mapping[str, ir.Value] | None = None,
    ) -> None:
        """Begin at the inputs of a model.

        Args:
            model: The model; it does not change while the stream lasts.
            feeds: One feed per sample.
            stops: Tensors that are not computed here, but `put`.
            types: Values with known types and shapes, by name; None for those that onnx infers.
        """
        self._place, self._stops, self._samples = str(model.graph.name), frozenset(stops), len(feeds)
        self._known: dict[ir.Value, list[Any]] = {}
        for value in model.graph.inputs:
            if all(value.name in feed for feed in feeds):
                self._known[value] = [feed[str(value.name)] for feed in feeds]
        self._reads = Reads(model.graph)
        self._done: set[ir.Node] = set()
        self._uses = Uses(self._reads, (), ())
        self._pieces: dict[ir.Value, Piece] = {}
        self._sessions: dict[int, InferenceSession] = {}
        self._models = PieceModels(model, self._reads, inferred(model) if types is None else types)

    def plan(self, targets: Sequence[ir.Value]) -> None:
        """Set the tensors that will be taken, in order, each as often as it is listed: nothing else is kept."""
        needed = [node for node in self._reads.ancestors(targets, (), self._stops) if node not in self._done]
        self._uses = Uses(self._reads, needed, targets)
        self._pieces = cut(self._reads, targets, self._known, self._stops, Uses(self._reads, needed, targets))
        self._sessions = {}
        self._forget()

    def take(self, value: ir.Value) -> list[Any]:
        """Return a tensor, an array per sample.

        Raises:
            RequantError: The runtime does not run the nodes before it.
        """
        if value not in self._known:
            piece = self._pieces[value]
            self._done.update(piece.nodes)
            self._uses.run(piece.nodes)
            for each, arrays in zip(piece.outputs, self._run(piece), strict=True):
                self._known[each] = arrays
        arrays = self._known[value]
        self._uses.take(value)
        self._forget()
        return arrays

    def put(self, value: ir.Value, arrays: list[Array]) -> None:
        """Set one of the `stops`."""
        self._known[value] = arrays
        self._forget()

    def shorten(self, samples: int) -> None:
        """Keep the first samples only."""
        self._samples = min(self._samples, samples)
        self._known = {value: arrays[:samples] for value, arrays in self._known.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are kept."""
        kept = (each for arrays in self._known.values() for each in arrays)
        return sum(int(getattr(a, "nbytes", 0)) for each in kept for a in (each if isinstance(each, list) else [each]))

    def _forget(self) -> None:
        """Drop the tensors that nothing will read or take."""
        self._known = {value: arrays for value, arrays in self._known.items() if value in self._uses}

    def _run(self, piece: Piece) -> list[list[Any]]:
        """Compute the outputs of a piece; one list of arrays per output."""
        if piece.index not in self._sessions:
            self._open(piece)
        session = self._sessions[piece.index]
        names = [piece.name(value) for value in piece.outputs]
        flags = [each.name for each in session.get_overridable_initializers() if each.name == piece.flag]
        on = dict.fromkeys(flags, np.array(True))

        def run(index: int) -> dict[str, Any]:
            feed = {piece.name(each): self._known[each][index] for each in piece.inputs}
            return run_session(session, names, feed | on, self._place)

        rows = list(spread(run, range(self._samples if piece.inputs else 1)))
        del self._sessions[piece.index]  # a session with all its pieces done holds memory and weights for nothing
        if not piece.inputs:  # it computes constants
            rows *= self._samples
        return [[row[name] for row in rows] for name in names]

    def _open(self, piece: Piece) -> None:
        """Open a piece with the pieces after it, or alone where these do not load with it.

        Raises:
            RequantError: The runtime does not load it.
        """
        following = [each for each in self._pieces.values() if each.index >= piece.index]
        group = [each for each in following if self._models.is_typed(each)][:GROUP]
        if piece in group and len(group) > 1:
            with suppress(RequantError):
                self._sessions |= dict.fromkeys((each.index for each in group), self._models.opened(group, self._known))
                return
        self._sessions[piece.index] = self._models.opened([piece], self._known)
