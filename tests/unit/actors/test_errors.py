import pickle

from actors.errors import RequestRejected


def test_a_rejection_crosses_processes_whole() -> None:
    error = pickle.loads(pickle.dumps(RequestRejected("too long", "prompt")))
    assert isinstance(error, RequestRejected)
    assert (str(error), error.message, error.param) == ("too long", "too long", "prompt")
