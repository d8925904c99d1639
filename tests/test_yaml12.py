import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainer import yaml12
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5E4", 5e4),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("0o17", 15),
        ("0x1F", 31),
        ("0123", 123),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("12:30:00", "12:30:00"),
        ("1_000", "1_000"),
        ("2026-12-01", "2026-12-01"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
    ],
)
def test_scalars_are_read_as_yaml_1_2(text: str, value: object) -> None:
    assert yaml12.load(text) == value
    assert type(yaml12.load(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' stands twice"),
        ("x: {lr: 1, lr: 2}", "'lr' stands twice"),
        ("1: x", "the key 1 is not a string"),
        ("a: [1", "line 1, column 6"),
        ("a: !!python/object:os.system x", "not valid YAML"),
        ("a:\n\t- b", "line 2"),
    ],
)
def test_errors_name_the_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        yaml12.load(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


TRICKY = ["no", "1e-3", "0o17", "12:30:00", "on", "~"]
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from(TRICKY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(_values)
def test_what_is_dumped_reads_back_the_same(value: object) -> None:
    text = yaml12.dump(value)
    assert yaml12.load(text) == value


@pytest.mark.parametrize("word", [*TRICKY, "null", "2026-12-01"])
def test_a_yaml_1_1_reader_sees_our_strings_as_strings(word: str) -> None:
    assert yaml.safe_load(yaml12.dump({"a": word})) == {"a": word}
