"""The guide's table of models says what becomes of each type of transformers."""

import pytest
import transformers

from tests.model_table import PAGE, TYPES, outcome, read_table, table

VERSION, OUTCOMES = read_table()
pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith(f"{VERSION}."), reason="the table is about another version"
)


def test_the_table_has_each_type_once_and_is_as_generated():
    assert sorted(OUTCOMES) == TYPES
    ordered = {model_type: OUTCOMES[model_type] for model_type in TYPES}
    assert table(ordered) in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_gives_transformers_tokens_or_is_refused_as_the_table_says(model_type):
    assert outcome(model_type) == OUTCOMES[model_type], "python -m tests.model_table --write"
