"""Where a graph's model calls belong: threads, sub-graphs, earlier checkpoints, and what their answers say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_sdk._requests import check_session_id
from bidikv_sdk.integrations._branches import Answer, Place, branch_id, place_of, session_id_of

NODE = "think:0001"


def test_a_thread_is_a_session() -> None:
    """A new thread begins its session, and goes on in it, with no parent."""
    assert place_of("t1", NODE, None, []) == Place("t1")
    assert place_of("t1", NODE, None, [Answer("t1", 1), Answer("t1", 2)]) == Place("t1")


def test_an_earlier_checkpoint_is_a_branch() -> None:
    """It branches off the session that gave its last answer, and is found again from its own answers."""
    place = place_of("t1", NODE, "c1", [Answer("t1", 1)])
    assert place == Place(branch_id("t1", "c1"), "t1")
    assert place_of("t1", NODE, "c1", [Answer("t1", 1), Answer(place.session_id, 2)]) == Place(place.session_id)
    assert place_of("t1", NODE, "c2", [Answer("t1", 1)]).session_id != place.session_id


def test_a_thread_goes_on_in_its_branch() -> None:
    """Later runs of the thread, which name no checkpoint, follow the answers into the branch."""
    branch = branch_id("t1", "c1")
    answers = [Answer("t1", 1), Answer(branch, 2)]
    assert place_of("t1", NODE, None, answers) == Place(branch)
    assert place_of("t1", NODE, "c2", answers) == Place(branch_id("t1", "c2"), branch)


def test_a_subgraph_is_a_branch() -> None:
    """Each run of one is; which of its nodes asks makes no difference, a graph inside of it does."""
    place = place_of("t1", f"graph:1|{NODE}", None, [Answer("t1", 1)])
    assert place.parent_id == "t1"
    assert place_of("t1", "graph:1|other:2", None, [Answer("t1", 1)]) == place
    assert place_of("t1", f"graph:2|{NODE}", None, [Answer("t1", 1)]) != place
    assert place_of("t1", f"graph:1|inner:1|{NODE}", None, [Answer("t1", 1)]) != place


def test_a_subgraph_with_a_history_of_its_own() -> None:
    """Where no answer says where its cache lies, it begins as the thread does, and then goes on by itself."""
    place = place_of("t1", f"graph:1|{NODE}", None, [])
    assert place.parent_id == "t1"
    assert place_of("t1", f"graph:1|{NODE}", None, [Answer(place.session_id, 1)]) == Place(place.session_id)


def test_answers_of_other_histories_are_not_followed() -> None:
    """An answer counts only where its number is that of the answers so far: else its session said other things."""
    other = branch_id("t1", "graph:1")
    answers = [Answer("t1", 1), Answer("t1", 2), Answer(other, 1)]
    assert place_of("t1", NODE, None, answers) == Place("t1")
    assert place_of("t1", NODE, None, [Answer(None), Answer("t9", 7)]) == Place("t1")


def test_a_history_from_another_thread_branches_off_there() -> None:
    """What another session said is shared, not taken over."""
    assert place_of("t2", NODE, None, [Answer("t1", 1)]) == Place("t2", "t1")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a~b", " a", "ü", "x" * 129, "a\nb"])
def test_names_that_cannot_be_ids(name: str) -> None:
    """They get an id all the same, always the same one."""
    assert session_id_of(name) == session_id_of(name) != name


@given(st.text(), st.text(), st.text())
def test_every_id_can_travel(thread_id: str, namespace: str, checkpoint_id: str) -> None:
    """Whatever a graph's names are, the server takes what is made of them."""
    place = place_of(thread_id, namespace, checkpoint_id, [])
    check_session_id(place.session_id)
    assert place.parent_id is None or check_session_id(place.parent_id)
