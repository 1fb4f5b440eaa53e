import json

import pytest

from tests.analysis.logs import parse


@pytest.mark.parametrize(
    "line",
    [
        r"INFO Received request r: prompt: 'C:\users', x",
        json.dumps({"asctime": "11-30 01:02:04", "message": "Received request r: prompt: 'secret\nline', x"}),
        "INFO Received request r: prompt: 'a', prompt_token_ids: [1, , 2], x",
    ],
)
def test_a_prompt_that_no_python_wrote(line):
    """A prompt of a text log that cannot be unquoted is one malformed line; the request's next line is read."""
    requests, problems = parse([line, "INFO Received request r: prompt: 'abcd', prompt_token_ids: [1, 2], x"])
    assert [request.num_prompt_tokens for request in requests] == [2]
    assert problems.counts == {"malformed_line": 1}
    assert problems.first_seen == {"malformed_line": "log:1"}
