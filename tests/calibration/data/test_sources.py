"""Sources of data: every form, every refusal, batches."""

from __future__ import annotations

import io
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from requant import RequantError, UnknownNameError
from requant.calibration import DataError, DataSpec, InputSpec, Sample, Source, open_source
from requant.calibration.model.session import Array

F4, F8, I4, I8 = (np.dtype(name) for name in ("float32", "float64", "int32", "int64"))

X = InputSpec("x", F4, ("N", 3))
MASK = InputSpec("mask", I8, ("N",))
FIXED = InputSpec("x", F4, (4, 3))


def rows(n: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.arange(n * int(np.prod(shape, dtype=int)), dtype=dtype).reshape(n, *shape)


def feeds(source: Source, name: str = "x") -> list[list[Any]]:
    return [sample.feed[name].tolist() for sample in source]


def write_npz(path: Path, arrays: Mapping[str, Array], *, compressed: bool = False) -> str:
    (np.savez_compressed if compressed else np.savez)(path, allow_pickle=False, **arrays)
    return str(path)


# ---------------------------------------------------------------------------------------------------- .npz


@pytest.mark.parametrize("compressed", [False, True], ids=["stored", "compressed"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_of_the_inputs_rank_is_cut_into_batches_of_one(tmp_path: Path, compressed: bool, order: Any) -> None:
    x = np.asarray(rows(5, 3), order=order)
    source = open_source(write_npz(tmp_path / "d.npz", {"x": x, "labels": np.arange(5)}, compressed=compressed), [X])
    for _ in range(2):  # a source can be read again
        assert feeds(source) == [row[None].tolist() for row in x]
    assert [sample.label for sample in source] == [0, 1, 2, 3, 4]
    assert source.length == 5
    assert source.description == str(tmp_path / "d.npz")
    assert [sample.where for sample in source][3] == f"{tmp_path / 'd.npz'}, sample 3"


@pytest.mark.parametrize("compressed", [False, True], ids=["stored", "compressed"])
def test_npz_is_read_sample_by_sample(tmp_path: Path, compressed: bool) -> None:
    x = np.random.default_rng(0).standard_normal((1000, 1000)).astype(np.float32)
    source = open_source(
        write_npz(tmp_path / "d.npz", {"x": x}, compressed=compressed), [InputSpec("x", F4, ("N", 1000))]
    )
    tracemalloc.start()
    try:
        assert sum(sample.feed["x"].size for sample in source) == x.size
        assert tracemalloc.get_traced_memory()[1] < x.nbytes / 8
    finally:
        tracemalloc.stop()


def test_npz_of_one_rank_more_holds_whole_feeds(tmp_path: Path) -> None:
    x = rows(4, 2, 3)
    source = open_source(
        tmp_path / Path(write_npz(tmp_path / "d.npz", {"x": x, "mask": rows(4, 2, dtype=np.int64)})).name, [X, MASK]
    )
    assert feeds(source) == x.tolist()
    assert feeds(source, "mask") == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_for_a_fixed_batch_is_cut_into_such_batches(tmp_path: Path, order: Any) -> None:
    x = np.asarray(rows(8, 3), order=order)
    source = open_source(write_npz(tmp_path / "d.npz", {"x": x, "labels": np.arange(8)}), [FIXED])
    assert feeds(source) == [x[:4].tolist(), x[4:].tolist()]
    assert [np.asarray(sample.label).tolist() for sample in source] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_npz_rest_that_fills_no_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"input 'x': 10 entries do not divide into .* batch of 4; remove 2 or add 2"):
        open_source(write_npz(tmp_path / "d.npz", {"x": rows(10, 3)}), [FIXED])


def test_npz_split(tmp_path: Path) -> None:
    arrays = {"x": rows(2, 3), "train/x": rows(3, 3), "train/labels": np.arange(3), "test/x": rows(4, 3)}
    path = write_npz(tmp_path / "d.npz", arrays)
    assert open_source(path, [X]).length == 2
    train = open_source(f"{path}:train", [X])
    assert (train.length, [sample.label for sample in train]) == (3, [0, 1, 2])
    assert [sample.label for sample in open_source(f"{path}:test", [X])] == [None] * 4
    with pytest.raises(DataError, match=r"no split named 'tain'; did you mean 'train'"):
        open_source(f"{path}:tain", [X])


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        (
            {"imgae": rows(2, 3), "image": rows(2, 3)},
            r"array 'imgae' is not an input of the model; did you mean 'image'",
        ),
        ({"train/imgae": rows(2, 3)}, r"array 'train/imgae' is not an input"),
        ({"labels": np.arange(2)}, r"no array named 'image' for the input"),
        (
            {"image": rows(2, 3, 4, 5)},
            r"input 'image': expected float32 \(N, 3\), got an array of shape \(2, 3, 4, 5\)",
        ),
        ({"image": rows(0, 3)}, r"holds no samples"),
        ({"image": rows(4, 3), "labels": np.arange(3)}, r"array 'labels': expected 4 labels, got shape \(3,\)"),
        ({"image": rows(4, 3), "labels": np.array(list("abcd"))}, r"label: expected a number"),
    ],
    ids=["unknown", "unknown-in-split", "missing", "rank", "empty", "labels", "text-labels"],
)
def test_npz_refusals_name_file_and_array(tmp_path: Path, arrays: dict[str, Array], problem: str) -> None:
    path = write_npz(tmp_path / "d.npz", arrays)
    with pytest.raises(DataError, match=problem) as caught:
        open_source(path, [InputSpec("image", F4, ("N", 3))])
    assert path in str(caught.value)


def test_npz_inputs_of_different_lengths_are_refused(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "d.npz", {"x": rows(4, 3), "mask": np.arange(5)})
    with pytest.raises(
        DataError, match=r"different numbers of samples: .*'x': 4, 'mask': 5.*; a folder of \.npz files"
    ):
        open_source(path, [X, MASK])


def test_npz_labels_that_are_an_input_are_fed(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "d.npz", {"labels": rows(4, 3)})
    (first, *_) = open_source(path, [InputSpec("labels", F4, ("N", 3))])
    assert first.feed["labels"].tolist() == [[0, 1, 2]]
    assert first.label is None


class Trap:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (pytest.fail, ("a pickle was read",))


def trap(path: Path) -> Path:
    np.save(path, np.array([Trap()], dtype=object), allow_pickle=True)
    return path


def test_pickles_are_never_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([Trap()], dtype=object))
    with pytest.raises(DataError, match=r"array 'x': .*contains pickled objects"):
        open_source(tmp_path / "d.npz", [X])
    np.savez(tmp_path / "e.npz", x=rows(1, 3), labels=np.array([Trap()], dtype=object))
    with pytest.raises(DataError, match=r"array 'labels': .*contains pickled objects"):
        open_source(tmp_path / "e.npz", [X])
    for name in ("npy", "npz"):
        folder = tmp_path / name
        folder.mkdir()
        trap(folder / "a.npy") if name == "npy" else np.savez(folder / "a.npz", x=np.array([Trap()], dtype=object))
        with pytest.raises(
            DataError, match=r"a.np[yz], .*: cannot be read: contains pickled objects, which are never read"
        ):
            list(open_source(folder, [X]))
    (tmp_path / "npy" / "a.npy").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match="cannot be read"):
        list(open_source(tmp_path / "npy", [X]))


def test_damaged_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    path.write_bytes(b"not a zip")
    with pytest.raises(DataError, match=r"d.npz: not a readable .npz file"):
        open_source(path, [X])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"not an array")
    with pytest.raises(DataError, match=r"d.npz, array 'x': cannot be read"):
        open_source(path, [X])
    stream = io.BytesIO()
    np.save(stream, rows(4, 3))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", stream.getvalue()[:-16])
    with pytest.raises(DataError, match=r"d.npz, array 'x': cannot be read: the array ends early"):
        open_source(path, [X])


# ---------------------------------------------------------------------------------------------------- folders


def test_folder_of_npz_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for index, name in enumerate(["b", "a", "c"]):
        np.savez(tmp_path / f"{name}.npz", x=rows(1, 3) + index, labels=np.array([index]))
    source = open_source(tmp_path, [X])
    assert [sample.label for sample in source] == [1, 0, 2]
    assert [sample.where for sample in source][2] == f"{tmp_path / 'c.npz'}, sample 2"
    assert source.length == 3


def test_folder_of_npy_files_for_one_input(tmp_path: Path) -> None:
    for index in range(3):
        np.save(tmp_path / f"{index}.npy", rows(1, 3) + index)
    np.save(tmp_path / "3.NPY", rows(1, 3) + 3)
    (tmp_path / "3.NPY.npy").rename(tmp_path / "3.NPY")
    (tmp_path / "._0.npy").write_bytes(b"what some systems keep beside a copied file")
    assert [feed[0][0] for feed in feeds(open_source(str(tmp_path), [X]))] == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"a \.npy file has one array, but the model has inputs mask, x; use .npz"):
        open_source(tmp_path, [X, MASK])


def test_folder_refusals(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no .npz or .npy files"):
        open_source(tmp_path, [X])
    np.savez(tmp_path / "a.npz", z=rows(1, 3))
    with pytest.raises(DataError, match=r"a.npz, sample 0: the model has no input named 'z'; there are: x"):
        list(open_source(tmp_path, [X]))
    np.save(tmp_path / "a.npy", rows(1, 3))
    with pytest.raises(DataError, match=r"both .npz and .npy"):
        open_source(tmp_path, [X])


def test_folder_reads_only_the_picked_files(tmp_path: Path) -> None:
    for index in range(4):
        np.save(tmp_path / f"{index}.npy", rows(1, 3) + index)
    (tmp_path / "1.npy").write_bytes(b"broken")
    assert [feed[0][0] for feed in feeds(open_source(tmp_path, [X]).samples(2))] == [0, 2]


# ---------------------------------------------------------------------------------------------------- Python


def generate() -> Iterator[dict[str, Array]]:
    for index in range(3):
        yield {"x": rows(1, 3) + index}


PAIRS = [(feed, index) for index, feed in enumerate(generate())]


class Feeds:
    """Iterable, of unknown length."""

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return generate()


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (generate, None),
        (generate(), None),
        (iter(PAIRS), None),
        (PAIRS, 3),
        (tuple(PAIRS), 3),
        (dict(enumerate(generate())).values(), 3),
        (Feeds(), None),
        (Feeds, None),
        (lambda: PAIRS, None),
    ],
    ids=["function", "generator", "iterator", "list", "tuple", "sized", "iterable", "class", "lambda"],
)
def test_python_objects_can_be_read_again(data: Any, length: int | None) -> None:
    source = open_source(data, [X])
    for _ in range(2):
        assert [feed[0][0] for feed in feeds(source)] == [0, 1, 2]
    assert source.length == length
    assert [feed[0][0] for feed in feeds(source.samples(2))] == [0, 1]


def test_a_callable_may_return_a_list_shorter_than_what_is_asked_for() -> None:
    """The number of samples is known only after the call."""
    source = open_source(lambda: PAIRS, [X])
    assert [feed[0][0] for feed in feeds(source.samples(5))] == [0, 1, 2]


def test_an_iterator_is_read_no_further_than_needed() -> None:
    taken = []

    def items() -> Iterator[dict[str, Array]]:
        for index in range(100):
            taken.append(index)
            yield {"x": rows(1, 3)}

    source = open_source(items(), [X])
    assert taken == []
    assert len(list(source.samples(3))) == 3
    assert taken == [0, 1, 2]
    assert len(list(source.samples(2))) == 2
    assert taken == [0, 1, 2]


def test_pairs_give_labels() -> None:
    assert [sample.label for sample in open_source(PAIRS, [X])] == [0, 1, 2]
    (sample,) = open_source([({"x": rows(2, 3)}, [7, 8])], [X])
    assert np.asarray(sample.label).tolist() == [7, 8]


FILE = """
from dataclasses import dataclass
import numpy as np
import beside_{stem}

@dataclass
class Pair:
    n: int

calls = []

def generate():
    import beside_{stem}_later
    calls.append(1)
    for index in range(beside_{stem}.N):
        yield {{"x": np.full((1, 3), index, np.float32)}}, index

feeds = [{{"x": np.zeros((1, 3), np.float32)}}]

def broken():
    yield feeds[0]
    raise KeyError("disk\\nfull")

nothing = 3
"""


@pytest.fixture
def python_file(tmp_path: Path) -> str:
    stem = tmp_path.name.replace("-", "_")
    (tmp_path / f"data_{stem}.py").write_text(FILE.format(stem=stem))
    (tmp_path / f"beside_{stem}.py").write_text("N = 3\n")
    (tmp_path / f"beside_{stem}_later.py").write_text("")
    return str(tmp_path / f"data_{stem}.py")


def test_python_file(python_file: str) -> None:
    source = open_source(f"{python_file}:generate", [X])
    for _ in range(2):
        assert [sample.label for sample in source] == [0, 1, 2]
    assert [sample.where for sample in source][1] == f"{python_file}:generate, sample 1"
    assert open_source(f"{python_file}:feeds", [X]).length == 1


def test_python_module(python_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(python_file).parent)
    name = Path(python_file).stem
    with pytest.raises(RequantError, match=rf"cannot be imported: .*; a file of this folder is named {name}.py:NAME"):
        open_source(f"{name}:generate", [X])
    monkeypatch.syspath_prepend(Path(python_file).parent)
    source = open_source(f"{name}:generate", [X])
    assert [sample.label for sample in source] == [0, 1, 2]


def test_python_leaves_the_path_as_it_was(python_file: str) -> None:
    import sys

    before = list(sys.path)
    iterator = iter(open_source(f"{python_file}:generate", [X]))
    next(iterator)
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "error", "problem"),
    [
        ("generat", UnknownNameError, r"no object in .*\.py named 'generat'; did you mean 'generate'"),
        ("broken", DataError, r"\.py:broken: failed at sample 1: KeyError: .disk.nfull."),
        ("nothing", DataError, r"\.py:nothing: an int is neither an iterable of feeds nor a callable"),
    ],
)
def test_python_file_refusals(python_file: str, name: str, error: type[RequantError], problem: str) -> None:
    with pytest.raises(error, match=problem) as caught:
        list(open_source(f"{python_file}:{name}", [X]))
    assert "\n" not in str(caught.value)


def test_python_code_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(RequantError, match=r"bad.py: cannot be imported: ModuleNotFoundError: .*no_such_module_at_all"):
        open_source(f"{tmp_path / 'bad.py'}:x", [X])
    with pytest.raises(RequantError, match=r"no_such_module_at_all: cannot be imported"):
        open_source("no_such_module_at_all:x", [X])


# ---------------------------------------------------------------------------------------------------- data sets, tensors


class Tensor:
    """What a tensor of another library offers: a method ``numpy``, and what tells why it fails."""

    def __init__(self, values: Any, dtype: str = "torch.float32", *, requires_grad: bool = False) -> None:
        self.values = np.asarray(values)
        self.dtype = dtype
        self.requires_grad = requires_grad

    def numpy(self) -> Array:
        if self.requires_grad or "bfloat16" in self.dtype:
            pytest.fail("asked for what cannot be given")
        if self.dtype == "meta":
            raise TypeError("can't convert meta device type tensor to numpy.\nUse Tensor.cpu()")
        return self.values


class Columns:
    """As a table of the library `datasets`: a dict for each position, without a batch axis; iterable too."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns
        self.asked: list[int] = []

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        return {name: column[index] for name, column in self.columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


class Entries:
    """As a data set of torch: items by position until IndexError, without ``__iter__``; perhaps without a length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class SizedEntries(Entries):
    def __len__(self) -> int:
        return len(self.items)


class IterableDataset(SizedEntries):
    """As torch's class of that name: it inherits ``__getitem__``, which nobody has written."""

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Loader:
    """As a loader of torch: batches, iterable again and again; its length may be unknown in spite of ``__len__``."""

    def __init__(self, items: list[Any], *, sized: bool = True) -> None:
        self.items = items
        self.sized = sized

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError("object of type 'Stream' has no len()")
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


ROW = [0.0, 1.0, 2.0]
UNBATCHED = [(Tensor(ROW), Tensor(7)), (Tensor(ROW), Tensor(8))]
BATCHED: list[Any] = [[Tensor([ROW, ROW]), Tensor([7, 8])], [Tensor([ROW]), Tensor([9])]]


@pytest.mark.parametrize(
    ("data", "length", "random", "shapes_", "labels"),
    [
        (Columns(x=[ROW] * 2, label=[7, 8]), 2, True, [(1, 3), (1, 3)], [7, 8]),
        (SizedEntries(UNBATCHED), 2, True, [(1, 3), (1, 3)], [7, 8]),
        (Entries(UNBATCHED), None, False, [(1, 3), (1, 3)], [7, 8]),
        (IterableDataset(UNBATCHED), 2, False, [(1, 3), (1, 3)], [7, 8]),
        (SizedEntries([{"x": Tensor(ROW), "labels": 4}]), 1, True, [(1, 3)], [4]),
        (SizedEntries([(Tensor(ROW),)]), 1, True, [(1, 3)], [None]),
        (SizedEntries([Tensor(ROW)]), 1, True, [(1, 3)], [None]),
        (SizedEntries([({"x": Tensor(ROW)}, Tensor([0, 1]))]), 1, True, [(1, 3)], [[[0, 1]]]),
        (Loader(BATCHED), 2, False, [(2, 3), (1, 3)], [[7, 8], [9]]),
        (Loader(BATCHED, sized=False), None, False, [(2, 3), (1, 3)], [[7, 8], [9]]),
        (Loader([[Tensor([ROW])]]), 1, False, [(1, 3)], [None]),
        (Loader([{"x": Tensor([ROW, ROW]), "label": Tensor([7, 8])}]), 1, False, [(2, 3)], [[7, 8]]),
        (Loader([[{"x": Tensor([ROW])}, Tensor([7])]]), 1, False, [(1, 3)], [[7]]),
        (SizedEntries([(rows(2, 3), np.array([7, 8]))]), 1, True, [(2, 3)], [[7, 8]]),
        (rows(2, 3), 2, True, [(1, 3), (1, 3)], [None, None]),
        (lambda: Entries(UNBATCHED), None, False, [(1, 3), (1, 3)], [7, 8]),
    ],
    ids=[
        "table", "data-set", "no-length", "stream", "dicts", "tuple-of-one", "tensors", "dict-and-label", "loader", "loader-of-a-stream",
        "loader-of-one", "loader-of-dicts", "loader-of-pairs", "keras-sequence", "array", "callable",
    ],
)  # fmt: skip
def test_data_sets_and_loaders(data: Any, length: int | None, random: bool, shapes_: list[Any], labels: list[Any]) -> None:  # fmt: skip
    source = open_source(data, [X])
    assert (source.length, source.rows.random, source.reference) == (length, random, None)
    for _ in range(2):
        assert [sample.feed["x"].shape for sample in source] == shapes_
        found = [label.tolist() if isinstance(label, np.ndarray) else label for label in (s.label for s in source)]
        assert found == labels


def test_a_table_is_asked_for_the_picked_rows_only() -> None:
    table = Columns(x=[ROW] * 10)
    source = open_source(table, [X])
    assert len(list(source.samples(2))) == 2
    assert table.asked == [0, 5]


def test_a_plain_feed_gets_no_batch_axis() -> None:
    with pytest.raises(DataError, match=r"expected float32 \(N, 3\), got float32 \(3,\)"):
        list(open_source([{"x": rows(3)}], [X]))


@pytest.mark.parametrize("label", ["positive", None, [["a"], [1, 2]]], ids=["text", "none", "ragged"])
def test_a_label_column_without_numbers_is_dropped(label: Any) -> None:
    (sample,) = open_source(Columns(x=[ROW], label=[label]), [X])
    assert sample.label is None


@pytest.mark.parametrize(
    ("data", "inputs", "problem"),
    [
        (Columns(x=[ROW], mask_=[1]), [X, MASK], r"no input named 'mask_'; did you mean 'mask'"),
        (Columns(x=[ROW], text=["a"]), [X], r"a Columns of feeds, sample 0: the model has no input named 'text'"),
        (Loader(BATCHED), [X, MASK], r"\(dict, label\) pair, got a tuple of 2; the model has inputs x, mask"),
        (Loader([(Tensor([ROW]),) * 3]), [X], r"got a tuple of 3"),
        (Loader([[[ROW], 1]]), [X], r"got list"),
        (Loader([Tensor([ROW], requires_grad=True)]), [X], r"sample 0, input 'x': the tensor requires grad; pass tensor.detach"),
        (Loader([Tensor([ROW], "torch.bfloat16")]), [X], r"sample 0, input 'x': NumPy has no bfloat16; pass tensor.float"),
        (Loader([np.ma.array([ROW], mask=True)]), [X], r"a masked array, whose masked values would count; pass array.filled"),
        (Loader([Tensor([ROW], "meta")]), [X], r"sample 0, input 'x': not an array: can't convert meta .* Use Tensor.cpu"),
        (type("DatasetDict", (dict,), {"column_names": {}})(train=1, test=2), [X], r"a DatasetDict of feeds: holds the splits train, test; pass one"),
        (lambda: 3, [X], r"failed at sample 0: TypeError: it returned an int; feeds are wanted"),
    ],
    ids=["near", "column", "inputs", "three", "list", "grad", "bfloat16", "mask", "device", "splits", "number"],
)  # fmt: skip
def test_data_sets_that_are_refused(data: Any, inputs: list[InputSpec], problem: str) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        list(open_source(data, inputs))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("missing.npz", r"missing.npz: no such file$"),
        ("missing.npz:train", r"missing.npz: no such file$"),
        ("missing.py:x", r"missing.py: no such file$"),
        ("missing", r"missing: no such file or folder; a data source is FILE.npz, .*PACKAGE.MODULE:NAME"),
        ("there.txt", r"there.txt: cannot be read as data; a data source is FILE.npz"),
        (b"x", r"bytes are no data source"),
        (3, r"^an int is neither an iterable of feeds nor a callable"),
        (None, r"^None is neither an iterable of feeds nor a callable"),
        ({"x": rows(1, 3)}, r"a single feed; pass \[feed\], or for arrays of many"),
    ],
    ids=["npz", "npz-split", "py", "text", "kind", "bytes", "number", "nothing", "feed"],
)
def test_what_is_no_source(spec: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.txt").write_text("x")
    with pytest.raises(RequantError, match=problem):
        open_source(spec, [X])


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ([rows(1, 3)], r"expected a dict of arrays or a \(dict, label\) pair, got list"),
        ({"X": rows(1, 3)}, r"the model has no input named 'X'; did you mean 'x'"),
        ({}, r"no array for the model's input 'x'; there are none"),
        ({"x": rows(1, 3, dtype=np.float16)}, r"input 'x': expected float32 \(N, 3\), got float16 \(1, 3\)"),
        ({"x": rows(1, 3, dtype=np.uint8)}, r"input 'x': expected float32 \(N, 3\), got uint8 \(1, 3\)"),
        ({"x": rows(3)}, r"input 'x': expected float32 \(N, 3\), got float32 \(3,\)"),
        ({"x": rows(1, 4)}, r"input 'x': expected float32 \(N, 3\), got float32 \(1, 4\)"),
        ({"x": np.array([[0, np.nan, 0]], F4)}, r"input 'x': expected finite float32, got nan at \(0, 1\)"),
        ({"x": np.array([[0, 0, -np.inf]], F4)}, r"input 'x': expected finite float32, got -inf at \(0, 2\)"),
        ({"x": np.array([[0, 0, 1e300]])}, r"input 'x': expected finite float32, got 1e\+300 at \(0, 2\)"),
        ({"x": rows(0, 3)}, r"input 'x': expected float32 \(N, 3\), got an empty array of shape \(0, 3\)"),
        ({"x": [[1, 2], [3]]}, r"input 'x': not an array"),
        ({"x": [None]}, r"input 'x': an array of Python objects"),
        (({"x": rows(1, 3)}, "cat"), r"label: expected a number or an array of numbers, got string"),
    ],
    ids=[
        "item", "near", "missing", "half", "bytes", "rank", "dim", "nan", "inf", "overflow", "empty", "ragged", "object", "label",
    ],
)  # fmt: skip
def test_bad_samples_name_source_sample_and_input(item: Any, problem: str) -> None:
    source = open_source([{"x": rows(1, 3)}, item], [X])
    with pytest.raises(DataError, match=r"^a list of feeds, sample 1.*" + problem) as caught:
        list(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("array", "shape", "told"),
    [
        (rows(1, 8, 9, 3), ("N", 3, 8, 9), "; its channels are at another place: transpose the array by (0, 3, 1, 2)"),
        (rows(1, 3, 8, 9), (None, None, None, 3), "; its channels are at another place: transpose the array by (0, 2, 3, 1)"),
        (rows(1, 3, 8, dtype=np.uint8), ("N", 3, 8), "; convert it to float32 and scale it as in training"),
        (rows(1, 4, 8, 9), ("N", 3, 8, 9), "got float32 (1, 4, 8, 9)"),
        (rows(1, 3, 8, dtype=np.uint8), ("N", 4, 9), "got uint8 (1, 3, 8)"),
        (rows(1, 3, 8, dtype=np.float16), ("N", 3, 8), "got float16 (1, 3, 8)"),
    ],
    ids=["channels last", "channels first", "bytes", "no order fits", "bytes of another shape", "half"],
)  # fmt: skip
def test_a_layout_and_bytes_that_are_known_are_named(array: Array, shape: tuple[Any, ...], told: str) -> None:
    with pytest.raises(DataError) as caught:
        list(open_source([{"x": array}], [InputSpec("x", F4, shape)]))
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (np.array([0.1, 2]), F4),
        (np.array([1, 2], ">f4"), F4),
        (np.array([1, -2], np.int32), I8),
        (np.array([1, -(2**31)], np.int64), I4),
        (np.array([1, 255], np.uint8), I8),
    ],
    ids=["double", "big-endian", "widened", "narrowed", "unsigned"],
)
def test_conversions_that_are_made(array: Array, wanted: np.dtype[Any]) -> None:
    (sample,) = open_source([{"x": array}], [InputSpec("x", wanted, (None,))])
    assert sample.feed["x"].dtype == wanted
    assert sample.feed["x"].tolist() == array.astype(wanted).tolist()


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (np.array([2**31]), I4),
        (np.array([-1]), np.dtype(np.uint8)),
        (np.array([2**63], np.uint64), I8),
        (np.array([1], np.float32), I8),
        (np.array([True]), I8),
        (np.array([1], np.float32), F8),
        (np.array(["a"]), F4),
    ],
    ids=["int32", "uint8", "int64", "float", "bool", "double", "text"],
)
def test_conversions_that_are_refused(array: Array, wanted: np.dtype[Any]) -> None:
    with pytest.raises(DataError, match=rf"input 'x': expected {wanted.name} \(\?,\), got"):
        list(open_source([{"x": array}], [InputSpec("x", wanted, (None,))]))


@pytest.mark.parametrize("dtype", [np.str_, object], ids=["texts", "objects, as of pandas"])
def test_texts_of_any_length_are_fed(dtype: Any) -> None:
    given = np.array(["ab", "c"], dtype)
    (sample,) = open_source([{"x": given}], [InputSpec("x", np.dtype(np.str_), ("N",))])
    assert sample.feed["x"].tolist() == ["ab", "c"]


@pytest.mark.parametrize("data", [[], lambda: iter(())], ids=["list", "generator"])
def test_an_empty_source_is_refused(data: Any) -> None:
    with pytest.raises(DataError, match="holds no samples"):
        list(open_source(data, [X]))


# ---------------------------------------------------------------------------------------------------- samples, batches


@pytest.mark.parametrize(
    ("n", "picked"),
    [(1, [0]), (2, [0, 5]), (3, [0, 3, 6]), (10, [*range(10)]), (99, [*range(10)])],
    ids=str,
)
@pytest.mark.parametrize("kind", ["npz", "list"])
def test_samples_are_picked_evenly(tmp_path: Path, kind: str, n: int, picked: list[int]) -> None:
    x = rows(10, 1)
    spec = [InputSpec("x", F4, ("N", 1))]
    data: Any = write_npz(tmp_path / "d.npz", {"x": x}) if kind == "npz" else [{"x": row[None]} for row in x]
    source = open_source(data, spec).samples(n)
    assert [feed[0][0] for feed in feeds(source)] == picked
    assert source.length == len(picked)
    assert [sample.where.rsplit(" ", 1)[1] for sample in source] == [str(index) for index in picked]


def test_samples_of_samples() -> None:
    source = open_source([{"x": row[None]} for row in rows(12, 3)], [X]).samples(6)
    assert [feed[0][0] / 3 for feed in feeds(source.samples(3))] == [0, 4, 8]
    assert source.description == "a list of feeds (6 samples)"
    with pytest.raises(RequantError, match="samples must be at least 1, not 0"):
        source.samples(0)


@pytest.mark.parametrize(
    ("kind", "random"),
    [("stored", True), ("compressed", False), ("fortran", False), ("npy", True), ("list", True), ("function", False)],
)
def test_positions_are_read(tmp_path: Path, kind: str, random: bool) -> None:
    x = rows(20, 1)
    data: Any = [{"x": row[None]} for row in x]
    if kind == "npy":
        for index, row in enumerate(x):
            np.save(tmp_path / f"{index:02}.npy", row[None])
        data = tmp_path
    elif kind == "function":
        feeds_ = list(data)
        data = lambda: iter(feeds_)
    elif kind != "list":
        order: Any = "F" if kind == "fortran" else "C"
        arrays = {"x": np.asarray(rows(20, 2) // 2, order=order), "labels": np.arange(20)}
        data = write_npz(tmp_path / "d.npz", arrays, compressed=kind == "compressed")
    width = 1 if kind in ("npy", "list", "function") else 2
    source = open_source(data, [InputSpec("x", F4, ("N", width))])
    assert source.rows.random is random
    for positions in ([], [0], [3, 4, 17], range(5, 9), [19]):
        assert [sample.feed["x"][0, 0] for sample in source.read(positions)] == [*positions]
    assert [sample.where.rsplit(" ", 1)[1] for sample in source.read([3, 17])] == ["3", "17"]
    few = source.samples(10)
    assert [sample.feed["x"][0, 0] for sample in few.read([1, 3])] == ([1, 3] if kind == "function" else [2, 6])


def test_positions_behind_the_last() -> None:
    known = open_source(PAIRS, [X])
    with pytest.raises(RequantError, match=r"a list of feeds: no sample 3; there are 3"):
        list(known.read([1, 3]))
    with pytest.raises(RequantError, match=r"a list of feeds \(2 samples\): no sample 2; there are 2"):
        list(known.samples(2).read([2]))
    assert [feed.feed["x"][0, 0] for feed in open_source(generate, [X]).read([1, 7])] == [1]


def test_positions_are_checked_like_all_samples() -> None:
    source = open_source([{"x": rows(1, 3)}, {"x": rows(1, 4)}], [X])
    with pytest.raises(DataError, match=r"sample 1, input 'x': expected float32 \(N, 3\)"):
        list(source.read([1]))


def test_a_part_of_a_damaged_npz_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, rows(4, 3))
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x.npy", stream.getvalue()[:-4])
        archive.writestr("more/x.npy", stream.getvalue())  # what lies behind must not be taken for values
    with pytest.raises(DataError, match=r"d.npz, array 'x': cannot be read: the array ends early: .*48 bytes.* are 44"):
        open_source(tmp_path / "d.npz", [X])


def test_the_reference_names_the_whole_source(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "d.npz", {"x": rows(6, 3)})
    for spec in (path, Path(path), DataSpec(path)):
        source = open_source(spec, [X]).samples(2)
        assert source.reference == DataSpec(path)
        again = open_source(pickle.loads(pickle.dumps(source.reference)), [X])
        assert again.length == 6
        assert feeds(again.samples(2)) == feeds(source)
    assert open_source(PAIRS, [X]).reference is None


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (
            ["a.npy", "b.png"],
            r"holds .npz or .npy files \(a.npy\) and images \(b.png\); it must hold one kind of files",
        ),
        (["x/a.wav", "b.JPG"], r"holds images \(b.JPG\) and .wav files \(x/a.wav\); it must hold one kind of files"),
        (["notes.txt"], r"holds no .npz or .npy files, images, .wav files or test_data_set_\*"),
    ],
    ids=["arrays-and-images", "images-and-sounds", "nothing"],
)
def test_folders_of_several_kinds(tmp_path: Path, names: list[str], problem: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=problem):
        open_source(tmp_path, [X])


def test_a_folder_of_arrays_may_have_pictures_below_it(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows(1, 3))
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "a.png").write_bytes(b"")
    assert open_source(tmp_path, [X]).length == 1


def shapes(samples: Iterator[Sample]) -> list[tuple[int, ...]]:
    return [sample.feed["x"].shape for sample in samples]


def test_batches_hold_all_samples_in_order() -> None:
    x = rows(7, 3)
    source = open_source([({"x": row[None]}, index) for index, row in enumerate(x)], [X])
    batches = list(source.batches(3))
    assert [batch.feed["x"].shape for batch in batches] == [(3, 3), (3, 3), (1, 3)]
    assert np.concatenate([batch.feed["x"] for batch in batches]).tolist() == x.tolist()
    assert [np.asarray(batch.label).tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches[1].where == "a list of feeds, sample 3 to a list of feeds, sample 5"


def test_batches_stack_equal_shapes_only() -> None:
    lengths = [2, 2, 3, 3, 3, 2]
    source = open_source([{"x": np.ones((1, n), F4)} for n in lengths], [InputSpec("x", F4, (None, "T"))])
    assert shapes(source.batches(2)) == [(2, 2), (2, 3), (1, 3), (1, 2)]


def test_batches_count_entries() -> None:
    source = open_source([{"x": rows(2, 3)} for _ in range(3)], [X])
    assert shapes(source.batches(5)) == [(4, 3), (2, 3)]
    assert shapes(source.batches(3)) == [(2, 3), (2, 3), (2, 3)]


@pytest.mark.parametrize(
    "specs",
    [
        {"x": InputSpec("x", F4, (1, 3))},
        {"x": X, "y": InputSpec("y", F4, ("M", 3))},
        {"x": X, "y": InputSpec("y", F4, ())},
        {"x": InputSpec("x", F4, (None, 3)), "y": InputSpec("y", F4, (2, 3))},
    ],
    ids=["fixed", "two-symbols", "scalar", "one-fixed"],
)
def test_without_a_common_batch_axis_samples_come_one_by_one(specs: Mapping[str, InputSpec]) -> None:
    feed = {
        name: np.ones([axis if isinstance(axis, int) else 1 for axis in spec.shape], F4) for name, spec in specs.items()
    }
    source = open_source([(feed, 1), (feed, 2)], list(specs.values()))
    batches = list(source.batches(2))
    assert [batch.feed["x"].shape for batch in batches] == [(1, 3), (1, 3)]
    assert [np.asarray(batch.label).tolist() for batch in batches] == [[1], [2]]


def test_labelled_and_unlabelled_samples_are_not_mixed() -> None:
    feed = {"x": rows(1, 3)}
    assert shapes(open_source([(feed, 1), feed, feed], [X]).batches(3)) == [(1, 3), (2, 3)]


def test_batches_of_nothing_are_refused() -> None:
    with pytest.raises(RequantError, match="batches of 0"):
        next(open_source(PAIRS, [X]).batches(0))


def test_no_source_is_named() -> None:
    with pytest.raises(DataError, match="the data source is an empty text"):
        open_source("", [X])


@pytest.mark.parametrize("text", ["import sys\nsys.exit(3)", "import sys\ndef feeds(): sys.exit(3)"])
def test_a_reader_that_exits_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(text + "\n")
    with pytest.raises(RequantError, match="SystemExit: 3"):
        next(iter(open_source(f"{tmp_path / 'reader.py'}:feeds", [X])))


def test_an_input_without_a_shape_is_told_from_a_wrong_array(tmp_path: Path) -> None:
    """The runtime says () of both a number and an input whose shape the model leaves open."""
    np.savez(tmp_path / "d.npz", x=np.zeros((64, 8), np.float32))
    with pytest.raises(RequantError, match=r"'x': the model takes one number, or does not say the shape .*\(64, 8\)"):
        list(open_source(str(tmp_path / "d.npz"), [InputSpec("x", F4, ())]))
