from contextlib import closing

import numpy as np
import pytest

from server_ext.analysis.turns import Names, Spool, Turn


@pytest.mark.parametrize("num_rows", [0, 1, 4095, 4096, 10_000])
def test_rows_come_back_as_they_were_given(num_rows):
    """Columns, samples and picked rows, also over the borders of batches, and also between appends."""
    with closing(Spool()) as spool:
        for n in range(num_rows):
            spool.append(
                Turn(
                    session=n,
                    turn=1,
                    model="m",
                    start_s=None,
                    end_s=1.5,
                    prompt_tokens=n * 2,
                    output_tokens=0,
                    cached_tokens=None,
                    ttft_s=None,
                )
            )
            if n % 3000 == 7:
                assert len(spool.column("session")) == n + 1
        assert spool.column("prompt").tolist() == list(range(0, 2 * num_rows, 2))
        assert np.isnan(spool.column("start_s")).all()
        stride = max(1, -(-num_rows // 100))
        assert spool.sample(100)["session"].tolist() == list(range(0, num_rows, stride))
        wanted = np.arange(num_rows)[::-7]
        assert spool.pick(wanted)["session"].tolist() == wanted.tolist()


def test_names_are_found_by_number():
    """A name is one line, whatever is in it."""
    with closing(Names()) as names:
        for name in ("a", "two\nlines", "ü", "\udcff"):
            names.append(name)
        assert names.find([1, 2, 3]) == {1: "two lines", 2: "ü", 3: "?"}
