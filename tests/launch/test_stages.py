from server_ext.launch.stages import LogFollower


def test_stages_are_read_from_lines_cut_anywhere():
    """A log that arrives in pieces gives the same stages as whole lines."""
    follower = LogFollower()
    follower.feed("INFO non-defau")
    assert follower.stage == "started"
    follower.feed("lt args: {}\nLoading weights took 1 s\n")
    assert follower.stage == "model loaded"


def test_stages_never_go_back():
    """A line of an earlier stage changes nothing."""
    follower = LogFollower()
    follower.advance("serving")
    follower.feed("non-default args\n")
    assert follower.stage == "serving"


def test_the_tail_holds_the_last_lines_and_the_unfinished_one():
    """What an engine said last is kept for the error, in bounded memory."""
    follower = LogFollower()
    follower.feed("".join(f"line {i}\n" for i in range(100)) + "half")
    assert follower.tail().splitlines()[0] == "line 70"
    assert follower.tail().endswith("line 99\nhalf")
