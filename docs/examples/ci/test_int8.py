"""Check the INT8 model against its baseline; ``pytest --requant-update`` writes the baseline."""


def test_int8_is_as_good_as_the_baseline(requant_check):
    requant_check("requant.toml")


def test_few_items_change_their_class(requant_check):
    found = requant_check("requant.toml", fail=False)
    assert found.measured.scores["agreement"].after.value > 0.99
