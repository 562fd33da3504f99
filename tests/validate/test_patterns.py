"""Regular expressions out of an adapter are run within a bound, or not at all."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.validate import Expectation, validate
from lora_fs.sidecar.validate.config import adapter_config
from lora_fs.sidecar.validate.config.patterns import (
    KEPT_COMPILED,
    MAX_CHOICES_IN_KEY,
    MAX_CHOICES_IN_TARGET,
    Budget,
    ModulePatterns,
    TargetModules,
    TooCostly,
    objection,
)
from tests.validate.conftest import Draft, good_config

NAME = "model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    "expression",
    [
        "q_proj",
        "model.layers.3.self_attn.q_proj",
        r"layers\.[0-3]\..*q_proj",
        r".*\.(q_proj|v_proj)",
        r"layers\.\d+\.(?:self_attn|mlp)",
        r"(self_attn\.)?q_proj",
        r"layers\.[0-9]{1,2}\.mlp\..*",
    ],
)
def test_what_people_write(expression: str) -> None:
    """Names and plain expressions pass."""
    assert objection(expression, MAX_CHOICES_IN_KEY) is None


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+$",
        "(a|a)*$",
        r"(a+|\\)+$",
        "(?x)(a+) +$",
        "a?" * 30 + "a" * 30,
        "(a|aa)" * 30,
        r"(a)\1",
        "(?=a)",
        ".*a" * 20,
        "(" * 500,
        "a{99999999999}",
        "x" * 3000,
        "[",
    ],
)
def test_what_could_run_for_ever(expression: str) -> None:
    """Expressions whose backtracking explodes, or that do not compile, are never run."""
    assert objection(expression, MAX_CHOICES_IN_KEY) is not None


@pytest.mark.parametrize("expression", ["[[a]q_proj", "[a--b]", "[]&&x]", "[^a||b]", r"[\]~~]", "(?#[)[[a]"])
def test_what_pythons_read_differently(expression: str) -> None:
    """What Python warns of, since it may come to mean a set of sets, is never compiled."""
    assert objection(expression, MAX_CHOICES_IN_KEY) is not None


@pytest.mark.parametrize("expression", ["[a-z]--", "q_proj||v_proj", r"\[[a-z]\]", "[]a[]", "[-a]&&"])
def test_what_all_pythons_read_alike(expression: str) -> None:
    """The same characters where they can mean but themselves."""
    assert objection(expression, MAX_CHOICES_IN_KEY) is None


@pytest.mark.parametrize("expression", ["q_proj{e}", "q_proj{i<=2}", "[qk]{1s+2d<=3}_proj", "q_proj{x"])
def test_what_the_engine_reads_differently(expression: str) -> None:
    """Its library takes braces for a misspelling to allow, and would scale modules that PEFT does not."""
    assert objection(expression, MAX_CHOICES_IN_KEY) is not None


@given(st.text("[]^-&~|\\a.()?#:", max_size=12))
def test_nothing_is_warned_of(expression: str) -> None:
    """Whatever passes compiles as a key and as a target, and whatever does not is refused, without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if objection(expression, MAX_CHOICES_IN_TARGET) is None:
            ModulePatterns({expression: 1})
            TargetModules(expression)


def test_first_key_that_matches_wins() -> None:
    """A key matches a suffix that begins at a dot, in the order of the config."""
    patterns = ModulePatterns({"k_proj": 2, "self_attn.q_proj": 4, "q_proj": 8})
    assert patterns.find(NAME, Budget()) == 4
    assert patterns.find("model.my_q_proj", Budget()) is None
    assert patterns.find("q_proj", Budget()) == 8


def test_targets_match_as_in_peft() -> None:
    """A list holds suffixes at a dot, text is one expression for the whole name."""
    assert TargetModules(("q_proj",)).covers(NAME, Budget())
    assert not TargetModules(("proj",)).covers(NAME, Budget())
    assert TargetModules(r".*\.q_proj").covers(NAME, Budget())
    assert not TargetModules(r"\.q_proj").covers(NAME, Budget())
    assert TargetModules("all-linear").covers(NAME, Budget())


def test_budget() -> None:
    """Once the time is spent matching stops, and a name of any length is not tried."""
    now = iter((0.0, 1.0, 1.0, 99.0))  # the beginning, a compilation, a match; and a match later
    patterns, budget = ModulePatterns({"q_proj": 4}), Budget(limit_s=5, clock=lambda: next(now))
    assert patterns.find(NAME, budget) == 4
    with pytest.raises(TooCostly):
        patterns.find(NAME, budget)
    with pytest.raises(TooCostly):
        TargetModules(".*").covers("x" * 1000, Budget())
    for target in (("q_proj",), ".*"):
        with pytest.raises(TooCostly):
            TargetModules(target).covers(NAME, Budget(limit_s=-1))


def test_keys_that_take_too_long_to_compile(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation counts against the budget of time."""
    patterns = ModulePatterns({"q_proj": 4})
    with pytest.raises(TooCostly):
        patterns.find(NAME, Budget(limit_s=-1))
    draft.config["rank_pattern"] = {"q_proj": 4}
    draft.write()
    monkeypatch.setattr(adapter_config, "Budget", partial(Budget, limit_s=-1))
    (finding,) = validate(draft.folder, Expectation()).errors
    assert (finding.code, finding.field) == ("pattern", "rank_pattern")
    assert finding.message == "takes too long to compile"


KEYS = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(KEPT_COMPILED + 1)]


@pytest.mark.parametrize(
    ("ranks", "alphas", "stalls"),
    [(KEYS, [], True), (KEYS[1:], [], False), (KEYS[1:], KEYS[1:], False), (KEYS[1:], KEYS[:1], True)],
)
def test_more_keys_than_vllm_keeps_compiled(
    ranks: Sequence[str], alphas: Sequence[str], stalls: bool, draft: Draft
) -> None:
    """A sidecar refuses it, since its stock engine would stall. Without a sidecar it is a warning.

    A key that is in both patterns counts once.
    """
    rank, alpha = good_config()["r"], good_config()["lora_alpha"]
    draft.config["rank_pattern"] = dict.fromkeys(ranks, rank)
    draft.config["alpha_pattern"] = dict.fromkeys(alphas, alpha)
    draft.write()
    expected = {"many-patterns"} if stalls else set()
    told, stock = validate(draft.folder, Expectation()), validate(draft.folder, Expectation(stock=True))
    assert {finding.code for finding in stock.errors} == expected
    assert {finding.code for finding in told.warnings} >= expected
    assert told.ok
    assert validate(draft.folder, Expectation(stock=True, allow=frozenset({"many-patterns"}))).ok


def test_a_busy_machine_spends_no_budget() -> None:
    """What other processes take of the time refuses no adapter."""
    budget = Budget(limit_s=0.05)
    time.sleep(0.1)
    budget.check()
